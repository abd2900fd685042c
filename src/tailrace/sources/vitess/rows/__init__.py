"""VStream's responses to the frames of the change log: rows in PostgreSQL's text of PostgreSQL's types."""
