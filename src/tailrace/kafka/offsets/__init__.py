"""Source offsets in a compacted topic."""
