"""Shared parts of the benchmarks: backlogs, clusters, peers, and the form of a result."""
