"""Delta tables with the current state of the source's tables."""
