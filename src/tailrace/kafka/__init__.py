"""Kafka: records and the offset that they lead to, in one transaction."""
