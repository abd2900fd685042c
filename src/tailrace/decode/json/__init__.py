"""Changes as JSON documents."""
