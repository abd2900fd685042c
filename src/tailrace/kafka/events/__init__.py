"""Events beside the changes of rows: boundaries of transactions, heartbeats, table schemas, dead letters."""
