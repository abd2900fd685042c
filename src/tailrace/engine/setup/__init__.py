"""From what a program or a file says to the parts of an engine; nothing is started here."""
