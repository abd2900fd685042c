"""What a pipeline shows of itself: on a terminal, in a file, as metrics."""
