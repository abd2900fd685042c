"""Columnar batches of changes, as the engine processes them, and a view of each change as a record."""
