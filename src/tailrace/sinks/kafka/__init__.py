"""The sink `kafka`."""
