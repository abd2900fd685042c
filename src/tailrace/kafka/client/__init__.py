"""Clients of a cluster: settings, questions, rights, topics."""
