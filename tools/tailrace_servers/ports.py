"""Free ports for embedded servers."""

from __future__ import annotations

import random
import socket
import sys

from tailrace.errors import Kind, TailraceError

# Below the range from which Linux takes the ports of outgoing connections, so that no connection gets
# the port of a server that is down.
_PORTS = range(20_000, 32_000)
_TRIES = 200


def free_port() -> int:
    """Return an unused port of 127.0.0.1.

    On Linux the port is reserved until this process ends: no other call, in any process, returns it, even
    if its server has not started yet or is down. A server that reuses addresses, as all do, may listen on it.

    :raises TailraceError: `ENVIRONMENT_UNFIT` if none was found.
    """
    for port in random.sample(_PORTS, k=_TRIES):
        with socket.socket() as place:
            try:
                place.bind(("127.0.0.1", port))
            except OSError:
                continue
            if sys.platform == "linux":
                # Only now: sockets that set this before they are bound would share the port.
                place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                place.detach()  # stays bound, and never listens
            return port
    raise TailraceError(
        Kind.ENVIRONMENT_UNFIT,
        f"find a free port: {_TRIES} of {_PORTS.start} to {_PORTS.stop - 1} are in use",
        "end servers that are no longer needed",
    )
