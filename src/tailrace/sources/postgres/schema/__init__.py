"""Tables and columns: the catalogue, the publication, and the facts of them that the log has."""
