"""Ranges of the log: how they are cut into splits, and which changes are in them."""
