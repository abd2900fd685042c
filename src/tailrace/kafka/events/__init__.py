"""Events other than row changes: boundaries of transactions, heartbeats, table schemas, dead letters."""
