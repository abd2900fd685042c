"""Delta tables that are as the source's tables are."""
