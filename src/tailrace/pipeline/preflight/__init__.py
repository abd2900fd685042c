"""Checks of everything that a pipeline needs, before it runs."""
