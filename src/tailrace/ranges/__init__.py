"""Ranges of the log: how they are cut into pieces, and which changes are in them."""
