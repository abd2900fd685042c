"""Ports for servers of one's own."""

from __future__ import annotations

import random
import socket

from tailrace.errors import Kind, TailraceError

# Below the range from which Linux takes the ports of outgoing connections: while the server is
# down, nobody else is given its port.
_PORTS = range(20_000, 32_000)
_TRIES = 200


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody uses now.

    :raises TailraceError: `ENVIRONMENT_UNFIT` if none was found.
    """
    for port in random.sample(_PORTS, k=_TRIES):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise TailraceError(
        Kind.ENVIRONMENT_UNFIT,
        f"look for a free port: {_TRIES} of {_PORTS.start} to {_PORTS.stop - 1} are in use",
        "end servers that are no longer needed",
    )
