"""Ranges of the log: divides them into input splits, and decodes the changes in them."""
