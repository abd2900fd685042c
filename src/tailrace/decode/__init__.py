"""From the source's wire bytes to Arrow columns: a pure function of a block of the log.

`changes.decode_block` is the way in. `kernel` knows the wire format and no types, `types` knows
the types and no wire format, `pgoutput` and `catalog` know the messages that describe tables.
"""
