"""Offsets of sinks and engines: storing them in the log, showing and changing them."""
