"""Decoding of the source's wire bytes into Arrow columns: a pure function of a block of the log.

`changes.decode_block` is the entry point. `kernel` knows the wire format and no types, `types` knows
the types and no wire format, `schemas` reads the messages that describe tables.
"""
