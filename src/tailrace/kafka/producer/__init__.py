"""Producers: batches of records, transactions, partitions."""
