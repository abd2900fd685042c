"""Compiled readers and writers of PostgreSQL's values."""
