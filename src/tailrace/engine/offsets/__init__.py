"""Offsets of an engine: which records are processed, when that is committed, and where."""
