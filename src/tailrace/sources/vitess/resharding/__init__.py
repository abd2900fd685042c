"""Resharding: positions by shard, journals, and the assignment of shards to tasks. Pure."""
