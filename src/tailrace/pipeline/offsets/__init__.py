"""Offsets of sinks and engines: kept beside the log, looked at, changed."""
