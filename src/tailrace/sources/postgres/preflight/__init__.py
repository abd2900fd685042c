"""Preflight: checks of the server, the slot, the publication and the tables before a pipeline runs."""
