"""`tailrace demo`: the main job on a real PostgreSQL, with a hard kill in the middle, proven."""

from tailrace_demo.story import run

__all__ = ["run"]
