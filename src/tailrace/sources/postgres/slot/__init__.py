"""The replication slot: its creation, health and heartbeat, and recovery after it is lost."""
