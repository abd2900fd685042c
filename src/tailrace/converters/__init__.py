"""Converters: records as they go out, in JSON, CloudEvents, Arrow or Python's own objects."""
