"""The section `source`."""
