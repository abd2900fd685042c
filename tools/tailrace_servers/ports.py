"""Ports for servers of one's own."""

from __future__ import annotations

import random
import socket
import sys

from tailrace.errors import Kind, TailraceError

# Below the range from which Linux takes the ports of outgoing connections: while the server is
# down, nobody else is given its port.
_PORTS = range(20_000, 32_000)
_TRIES = 200


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody uses now.

    On Linux it is this process's until it ends: no other call, in any process, returns it, also while
    its server has not started yet or is down. A server that reuses addresses, as all do, may listen on it.

    :raises TailraceError: `ENVIRONMENT_UNFIT` if none was found.
    """
    for port in random.sample(_PORTS, k=_TRIES):
        with socket.socket() as place:
            try:
                place.bind(("127.0.0.1", port))
            except OSError:
                continue
            if sys.platform == "linux":
                # Said only now: bound like this from the start, it would share the port with its like.
                place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                place.detach()  # stays bound, and never listens
            return port
    raise TailraceError(
        Kind.ENVIRONMENT_UNFIT,
        f"look for a free port: {_TRIES} of {_PORTS.start} to {_PORTS.stop - 1} are in use",
        "end servers that are no longer needed",
    )
