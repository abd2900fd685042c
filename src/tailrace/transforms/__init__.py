"""Transformations: what a record goes through before it is converted, and predicates that choose."""
