"""The embeddable engine: tasks that poll, records that are processed, offsets that are committed."""
