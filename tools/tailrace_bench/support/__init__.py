"""What benchmarks share: backlogs, clusters, peers, and the form of a result."""
