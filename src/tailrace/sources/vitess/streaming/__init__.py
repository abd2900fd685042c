"""Capture: reads the streams of shards and appends them to the log."""
