"""Changes on their way through the engine: columnar batches, with a view of each change as a record."""
