"""SQL expressions over columns: a small language that computes values, and can do nothing else."""
