"""Sinks of plain files: Parquet and JSON Lines."""
