"""`tailrace demo`: a pipeline on a real PostgreSQL, killed while it works, with a check of the result."""

from tailrace_demo.story import run

__all__ = ["run"]
