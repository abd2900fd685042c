"""Snapshots: rows that existed before, beside the stream, in the same log."""
