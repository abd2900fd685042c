"""What vtgate is asked for when a shard's stream is opened."""

from __future__ import annotations

import base64

from tailrace.config.patterns import table_expression
from tailrace.config.source.vitess import VitessSource
from tailrace.sources.vitess.connection import vstream_pb2 as pb
from tailrace.sources.vitess.connection.metadata import TABLET_TYPES
from tailrace.sources.vitess.resharding.events import OpenStream

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
    request = pb.VStreamRequest(
        tablet_type=TABLET_TYPES[source.tablet_type],
        filter=pb.Filter(rules=table_rules(source)),
        flags=pb.VStreamFlags(
            heartbeat_interval=source.heartbeat_interval_s,
            include_reshard_journal_events=True,
            exclude_keyspace_from_table_name=True,
            transaction_chunk_size=CHUNK_BYTES,
        ),
    )
    for shard, gtid in opened.positions.items():
        position = request.vgtid.shard_gtids.add(keyspace=source.keyspace, shard=shard, gtid=gtid)
        if shard == opened.shard:
            for key in opened.keys.values():
                position.table_pks.append(pb.TableLastPk.FromString(base64.b64decode(key)))
    return request
