"""Clients of a cluster: settings, requests, rights, topics."""
