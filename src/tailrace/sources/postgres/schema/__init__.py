"""Tables and columns: the catalogue, the publication, and what the log keeps of them."""
