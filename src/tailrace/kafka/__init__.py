"""Kafka: writes records and the source offset after them in one transaction."""
