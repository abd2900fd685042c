"""Offsets of an engine: which records are processed, and when and where offsets are committed."""
