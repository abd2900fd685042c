"""A process that reads from vtgate forks others, as when Java is started, and each of them lives."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

#: It streams from itself by gRPC, and forks meanwhile; the module is one that imports gRPC by itself.
FORKING = """
import tailrace.sources.vitess.connection.metadata
import itertools, os, subprocess, threading, time
from concurrent.futures import ThreadPoolExecutor
import grpc

class Endless(grpc.GenericRpcHandler):
    def service(self, details):
        def responses(request, context):
            for _ in itertools.count():
                yield b"x"
                time.sleep(0.002)
        return grpc.unary_stream_rpc_method_handler(responses)

server = grpc.server(ThreadPoolExecutor(4))
server.add_generic_rpc_handlers((Endless(),))
address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
server.start()
streams = [grpc.insecure_channel(address).unary_stream("/a/b")(b"") for _ in range(3)]
for stream in streams:
    next(stream)
    threading.Thread(target=list, args=(stream,), daemon=True).start()
runs = [subprocess.run(["true"], preexec_fn=lambda: None, stderr=subprocess.PIPE) for _ in range(500)]
print({(run.returncode, run.stderr) for run in runs}, flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_a_process_forked_beside_streams_is_not_ended_by_grpc() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    command = [sys.executable, "-c", FORKING]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout == "{(0, b'')}\n"
