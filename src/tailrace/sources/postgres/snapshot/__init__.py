"""Snapshots: reading existing rows into the log, before or while changes are streamed."""
