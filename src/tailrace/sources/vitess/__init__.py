"""Vitess: many shards of MySQL behind vtgate, captured through VStream."""
