"""Joining an ordered data topic with the ordered topic of its transactions, without a state store."""
