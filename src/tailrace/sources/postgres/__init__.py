"""The source `postgresql`: captures changes and snapshots of a PostgreSQL database into the log."""
