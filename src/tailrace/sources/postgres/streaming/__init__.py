"""Streaming: appends the replication stream to the log and confirms durable positions to the server."""
