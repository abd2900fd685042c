"""Transcodes VStream's responses to frames of the change log: rows in the text of PostgreSQL's types."""
