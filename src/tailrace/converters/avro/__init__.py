"""Avro: schemas, and the binary form."""
