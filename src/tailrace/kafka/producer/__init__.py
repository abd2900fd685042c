"""Kafka producers: batches of records, transactions, partitions."""
