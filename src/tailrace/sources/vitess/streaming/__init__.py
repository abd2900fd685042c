"""The streams of shards, into the log."""
