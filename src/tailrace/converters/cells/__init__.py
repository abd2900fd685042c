"""Changes as cells and columns, from the wire or from a group's columns, for the writers of JSON and Avro."""
