"""A connection to vtgate, and what it is asked."""
