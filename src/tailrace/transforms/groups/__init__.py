"""Groups of records as columns: what transformations read and change."""
