"""Streaming: the replication stream into the log, and what is confirmed to the server."""
