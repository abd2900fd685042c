"""Sources: the databases from which changes are captured. Each has its own package."""
