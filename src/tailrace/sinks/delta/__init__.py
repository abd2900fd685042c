"""Sinks of Delta tables: histories and mirrors."""
