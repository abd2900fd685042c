"""Offsets in a compacted topic."""
