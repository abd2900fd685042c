"""Transformations of groups of records, whose columns they read and change."""
