"""The replication slot: its health, its heartbeat, and the ways out when it is lost."""
