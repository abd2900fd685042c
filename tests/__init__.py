"""The tests. What they share is in `support`."""
