"""A consumer that is fed from memory while it keeps up, and from the change log while it does not."""
