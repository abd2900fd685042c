"""Connections to vtgate, and queries over them."""
