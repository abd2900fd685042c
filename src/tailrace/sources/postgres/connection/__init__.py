"""Connections to the server: sessions, transports, and the server's errors."""
