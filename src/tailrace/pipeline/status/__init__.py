"""The status of a pipeline: on a terminal, in a file, as metrics."""
