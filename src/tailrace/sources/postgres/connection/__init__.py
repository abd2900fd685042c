"""Connections to the server: sessions, transports, the server's errors."""
