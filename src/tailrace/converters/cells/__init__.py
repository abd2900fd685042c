"""Changes cell by cell, from the wire or from columns, for the writers of JSON."""
