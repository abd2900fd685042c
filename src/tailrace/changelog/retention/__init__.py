"""Retention: which segments may be removed, which consumers still need them, and their removal."""
