"""A pipeline's logs: inspected, read, retained."""
