"""What vtgate is asked for when a shard's stream is opened."""

from __future__ import annotations

import base64
from collections.abc import Iterable

from tailrace.config.patterns import table_expression
from tailrace.config.source.vitess import VitessSource
from tailrace.sources.vitess.connection import vstream_pb2 as pb
from tailrace.sources.vitess.connection.metadata import TABLET_TYPES, quoted
from tailrace.sources.vitess.resharding.events import OpenStream
from tailrace.sources.vitess.resharding.gtid_sets import TO_COPY
from tailrace.sources.vitess.resharding.shard_state import CopyChunk
from tailrace.sources.vitess.rows.copy_keys import key_before

#: From this size on, a server that can (24 and later) sends a transaction in pieces, and need not hold it.
CHUNK_BYTES = 16 << 20


def table_rules(source: VitessSource) -> list[pb.Rule]:
    """Return which tables the server sends: not fewer than are captured.

    Its rules have no word for a table that is left out, and a regular expression of ours is for the whole
    name in Python's language: where there is one, all tables are sent.
    """
    expressions = [table_expression(pattern, source.keyspace) for pattern in source.tables]
    if None in expressions:
        return [pb.Rule(match="/.*")]
    return [pb.Rule(match=f"/{expression}") for expression in expressions if expression]


def stream_request(source: VitessSource, opened: OpenStream) -> pb.VStreamRequest:
    """Return the request for a shard's stream; with other shards in it, where it is a junction."""
    request = _request(source, table_rules(source))
    for shard, gtid in opened.positions.items():
        keys = opened.keys.values() if shard == opened.shard else ()
        _add_position(request, source, shard, gtid, keys)
    return request


def chunk_request(source: VitessSource, shard: str, chunk: CopyChunk) -> pb.VStreamRequest:
    """Return the request for the stream that copies a chunk, or goes on with it.

    It goes on from where it is: the server sends what changed since, and then the rows behind the key.
    """
    request = _request(source, [pb.Rule(match=chunk.table, filter=_condition(chunk))])
    if chunk.key:
        _add_position(request, source, shard, chunk.gtid, (chunk.key,))
    elif chunk.low is not None and chunk.low < 0:
        _add_position(request, source, shard, TO_COPY, (key_before(chunk.table, chunk.column, chunk.low),))
    else:
        _add_position(request, source, shard, TO_COPY, ())
    return request


def _condition(chunk: CopyChunk) -> str:
    # Tablets refuse a negative number here: there, a key says where rows begin.
    column = quoted(chunk.column)
    bounds = [f"{column} >= {chunk.low}"] if chunk.low is not None and chunk.low >= 0 else []
    if chunk.high is not None:
        bounds.append(f"{column} < {chunk.high}")
    # All of a table needs no condition.
    return f"select * from {quoted(chunk.table)} where {' and '.join(bounds)}" if bounds else ""  # noqa: S608


def _request(source: VitessSource, rules: list[pb.Rule]) -> pb.VStreamRequest:
    return pb.VStreamRequest(
        tablet_type=TABLET_TYPES[source.tablet_type],
        filter=pb.Filter(rules=rules),
        flags=pb.VStreamFlags(
            heartbeat_interval=source.heartbeat_interval_s,
            include_reshard_journal_events=True,
            exclude_keyspace_from_table_name=True,
            transaction_chunk_size=CHUNK_BYTES,
        ),
    )


def _add_position(
    request: pb.VStreamRequest, source: VitessSource, shard: str, gtid: str, keys: Iterable[str]
) -> None:
    position = request.vgtid.shard_gtids.add(keyspace=source.keyspace, shard=shard, gtid=gtid)
    for key in keys:
        position.table_pks.append(pb.TableLastPk.FromString(base64.b64decode(key)))
