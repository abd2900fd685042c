"""Responses of a real vtgate, as a capture gets them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import grpc

from tailrace.sources.vitess.connection import vstream_pb2 as pb
from tailrace_servers.vitess import EmbeddedVitess

_METHOD = "/vtgateservice.Vitess/VStream"
_TIMEOUT_S = 60.0


def position_now(cluster: EmbeddedVitess, shard: str) -> str:
    """Return the position of a shard's newest transaction."""
    gtid = cluster.execute("select @@global.gtid_executed", target=f"{cluster.keyspace}:{shard}@primary")
    return f"MySQL56/{gtid[0][0]}".replace("\n", "")


def responses(
    cluster: EmbeddedVitess,
    shard: str,
    gtid: str,
    tables: Sequence[str],
    until: Callable[[pb.VStreamResponse], bool],
) -> list[bytes]:
    """Return vtgate's responses for tables of a shard, up to the one that `until` accepts.

    :param gtid: from there on; empty: the tables are copied first.
    """
    request = pb.VStreamRequest(tablet_type=pb.PRIMARY)
    request.vgtid.shard_gtids.add(keyspace=cluster.keyspace, shard=shard, gtid=gtid)
    for table in tables:
        request.filter.rules.add(match=table, filter=f"select * from {table}")
    found: list[bytes] = []
    with grpc.insecure_channel(cluster.address) as channel:
        call = channel.unary_stream(_METHOD, request_serializer=pb.VStreamRequest.SerializeToString)
        stream = call(request, timeout=_TIMEOUT_S)
        ends_s = time.monotonic() + _TIMEOUT_S
        for response in stream:
            found.append(response)
            if until(pb.VStreamResponse.FromString(response)):
                break
            assert time.monotonic() < ends_s, "the stream ended without the expected response"
        stream.cancel()
    return found


def is_copied(response: pb.VStreamResponse) -> bool:
    """Return whether a copy is complete with this response."""
    return any(event.type == pb.COPY_COMPLETED for event in response.events)


def has_row(key: bytes) -> Callable[[pb.VStreamResponse], bool]:
    """Return a predicate that accepts the response with the commit of a row whose first value is `key`."""

    def accepts(response: pb.VStreamResponse) -> bool:
        return any(
            change.after.values.startswith(key)
            for event in response.events
            for change in event.row_event.row_changes
        )

    return accepts
