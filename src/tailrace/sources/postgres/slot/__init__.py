"""The replication slot: its health, its heartbeat, and what to do when it is lost."""
