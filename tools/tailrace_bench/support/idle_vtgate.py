"""A simulated vtgate of many idle shards, in a separate process, which prints its port.

python -m tailrace_bench.support.idle_vtgate 1000
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from tailrace.sources.vitess.connection import vstream_pb2 as pb

KEYSPACE = "shop"
#: The query for the number of open streams.
OPEN_STREAMS = "open streams"
_SERVICE = "vtgateservice.Vitess"
_GTID = "0b1cf0f1-6b3e-11ef-8bd5-0242ac120002:1-1000"


def shards(count: int) -> list[str]:
    """Return the names of `count` shards of about equal size."""
    bounds = ["", *(f"{(number << 16) // count:04x}" for number in range(1, count)), ""]
    return [f"{start}-{end}" for start, end in itertools.pairwise(bounds)]


async def _execute(request: pb.ExecuteRequest, _context: Any) -> pb.ExecuteResponse:
    sql, found = request.query.sql.lower(), pb.ExecuteResponse()
    if "vitess_shards" in sql:
        rows = [[f"{KEYSPACE}/{name}"] for name in _SHARDS]
    else:
        rows = [[str(len(_OPEN))]] if sql == OPEN_STREAMS else [[_GTID, ""]]
    for row in rows:
        cells = [cell.encode() for cell in row]
        found.result.rows.append(pb.Row(lengths=[len(cell) for cell in cells], values=b"".join(cells)))
    return found


async def _stream(request: pb.VStreamRequest, _context: Any) -> AsyncIterator[pb.VStreamResponse]:
    (wanted,) = request.vgtid.shard_gtids
    _OPEN.add(wanted.shard)
    try:
        async for response in _responses(request, wanted):
            yield response
    finally:
        _OPEN.discard(wanted.shard)


async def _responses(request: pb.VStreamRequest, wanted: pb.ShardGtid) -> AsyncIterator[pb.VStreamResponse]:
    if wanted.gtid == "current":
        position = pb.ShardGtid(keyspace=KEYSPACE, shard=wanted.shard, gtid=f"MySQL56/{_GTID}")
        own: dict[str, Any] = {"timestamp": int(time.time()), "keyspace": KEYSPACE, "shard": wanted.shard}
        yield pb.VStreamResponse(
            events=[
                pb.VEvent(type=pb.VGTID, vgtid=pb.VGtid(shard_gtids=[position]), **own),
                pb.VEvent(type=pb.OTHER, **own),
            ]
        )
    while True:
        await asyncio.sleep(request.flags.heartbeat_interval)
        beat = pb.VEvent(type=pb.HEARTBEAT, timestamp=int(time.time()), current_time=time.time_ns())
        yield pb.VStreamResponse(events=[beat])


async def _serve() -> None:
    server = grpc.aio.server()
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "VStream": grpc.unary_stream_rpc_method_handler(
            _stream, pb.VStreamRequest.FromString, pb.VStreamResponse.SerializeToString
        ),
        "Execute": grpc.unary_unary_rpc_method_handler(
            _execute, pb.ExecuteRequest.FromString, pb.ExecuteResponse.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


_SHARDS: list[str] = []
_OPEN: set[str] = set()

if __name__ == "__main__":
    _SHARDS += shards(int(sys.argv[1]))
    asyncio.run(_serve())
