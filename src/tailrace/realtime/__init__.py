"""Real time: a consumer is fed from memory while it keeps up, and from the change log otherwise."""
