"""Sinks: where changes go. `contract` says what one must do, `build` makes them."""
