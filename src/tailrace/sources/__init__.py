"""Sources: the databases that changes come from. Each has a package of its own."""
