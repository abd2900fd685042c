"""Shards that come and go: positions by shard, journals, and which task reads which shard. Pure."""
