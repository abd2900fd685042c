"""Builds the requests to vtgate that open streams of shards."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable

from tailrace.config.patterns import table_expression
from tailrace.config.source.vitess import VitessSource
from tailrace.sources.vitess.connection import vstream_pb2 as pb
from tailrace.sources.vitess.connection.metadata import TABLET_TYPES, quoted
from tailrace.sources.vitess.resharding.events import OpenStream
from tailrace.sources.vitess.resharding.gtid_sets import TO_COPY
from tailrace.sources.vitess.resharding.shard_state import CopyChunk
from tailrace.sources.vitess.rows.copy_keys import key_before

#: Size in bytes from which Vitess 24 and later send a transaction in pieces, without keeping it in memory.
CHUNK_BYTES = 16 << 20


def table_rules(source: VitessSource) -> list[pb.Rule]:
    """Return the rules that select the tables that the server sends: at least those that are captured.

    Its rules can't exclude a table, and a regular expression in our settings is in Python's syntax and
    matches the full name: if there is one, all tables are sent.
    """
    expressions = [table_expression(pattern, source.keyspace) for pattern in source.tables]
    if None in expressions:
        return [pb.Rule(match="/.*")]
    return [pb.Rule(match=f"/{expression}") for expression in expressions if expression]


def is_sent(source: VitessSource, table: str) -> bool:
    """Return whether the server sends a table, captured or not."""
    return any(re.search(rule.match.removeprefix("/"), table) for rule in table_rules(source))


def stream_request(source: VitessSource, opened: OpenStream) -> pb.VStreamRequest:
    """Return the request for a shard's stream; for a junction, it includes the other participants."""
    request = _request(source, table_rules(source))
    for shard, gtid in opened.positions.items():
        keys = opened.keys.values() if shard == opened.shard else ()
        _add_position(request, source, shard, gtid, keys)
    return request


def chunk_request(source: VitessSource, shard: str, chunk: CopyChunk) -> pb.VStreamRequest:
    """Return the request for the stream that copies a chunk, or continues its copy.

    To continue, the server sends the changes since the chunk's position, and then the rows behind its key.
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
    # Tablets refuse a negative number in a condition: for one, a key defines where the rows start.
    column = quoted(chunk.column)
    bounds = [f"{column} >= {chunk.low}"] if chunk.low is not None and chunk.low >= 0 else []
    if chunk.high is not None:
        bounds.append(f"{column} < {chunk.high}")
    # Not empty for a complete table: then a tablet copies it, but refuses each of its changes.
    where = f" where {' and '.join(bounds)}" if bounds else ""
    return f"select * from {quoted(chunk.table)}{where}"  # noqa: S608 - quoted


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
