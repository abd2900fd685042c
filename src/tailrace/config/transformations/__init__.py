"""The options of transformations and predicates."""
