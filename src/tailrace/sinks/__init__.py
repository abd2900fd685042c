"""Sinks: the targets of changes. `contract` is their interface, `build` creates them."""
