"""Which segments may go, who still reads them, and their removal."""
