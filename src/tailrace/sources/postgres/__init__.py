"""PostgreSQL as a source: capture of its changes into the log, and decoding of what the log holds."""
