"""Each port is given out once."""

from __future__ import annotations

import socket
import sys

import pytest

from tailrace.errors import Kind, TailraceError
from tailrace_servers import ports


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a port is looked for, and not kept")
def test_a_port_is_kept_for_its_server_while_that_is_down(monkeypatch):
    port = ports.free_port()
    monkeypatch.setattr(ports, "_PORTS", range(port, port + 1))
    monkeypatch.setattr(ports, "_TRIES", 1)

    def require_taken():
        with pytest.raises(TailraceError) as raised:
            ports.free_port()
        assert raised.value.kind is Kind.ENVIRONMENT_UNFIT

    require_taken()
    for address in ("127.0.0.1", ""):  # its server is started, stopped, and started again
        with socket.create_server((address, port)):
            require_taken()
            socket.create_connection(("127.0.0.1", port)).close()
        require_taken()
