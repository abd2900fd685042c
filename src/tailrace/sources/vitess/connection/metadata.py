"""Queries to vtgate: shards, tablets, positions, keys, and a shard's binlog settings."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import grpc

from tailrace.backoff import Backoff
from tailrace.config.source.vitess import VitessSource
from tailrace.errors import Kind, Policy, TailraceError
from tailrace.sources.vitess.connection import vstream_pb2 as pb
from tailrace.sources.vitess.connection.event_loop import submit
from tailrace.sources.vitess.connection.vtgate import Row, Vtgate, answer_of
from tailrace.sources.vitess.rows.types import NOT_NULL, PRIMARY_KEY

TABLET_TYPES = {"primary": pb.PRIMARY, "replica": pb.REPLICA, "rdonly": pb.RDONLY}

_GTIDS = "select @@global.gtid_executed, @@global.gtid_purged"
_SHARDS = ("show vitess_shards", "list the shards", "@primary")
_BINLOG = "select @@global.binlog_row_image, @@global.binlog_format, @@global.gtid_mode"


#: Retries of a listing: vtgate repeats an error of its topology server for a second.
_LISTING = Backoff(attempts_max=4, first_s=0.3, longest_s=1.0)


@dataclass(frozen=True, slots=True)
class Tablet:
    """A tablet in vtgate's view: type `PRIMARY`, `REPLICA`, …; state `SERVING` or another one."""

    shard: str
    type: str
    state: str


def serving_shards(vtgate: Vtgate, source: VitessSource) -> tuple[str, ...]:
    """Return the shards of the keyspace that serve.

    :raises TailraceError: `SOURCE_MISCONFIGURED` if there is no such keyspace; `SOURCE_UNREACHABLE` if vtgate
        knows none.
    """
    backoff = _LISTING
    while True:
        try:
            return shards_in(vtgate.query(*_SHARDS), source)
        except TailraceError as error:
            backoff, wait_s = backoff.after(error)
            if wait_s is None:
                raise
            time.sleep(wait_s)


def ask_shards(vtgate: Vtgate) -> Future[list[Row]]:
    """Request the serving shards, and return at once: `shards_in` reads the answer."""
    return vtgate.ask(*_SHARDS)


def shards_in(rows: Sequence[Row], source: VitessSource) -> tuple[str, ...]:
    """Return the shards of the keyspace in an answer. Raises like `serving_shards`."""
    if not rows:
        # While vtgate reads its list of keyspaces again, it gives another client's request an empty one.
        raise TailraceError(
            Kind.SOURCE_UNREACHABLE,
            f"list the shards of the keyspace {source.keyspace!r}: vtgate lists no shard of any keyspace",
            "it is retried; if it persists, see vtctldclient GetSrvKeyspaces for vtgate's cell",
        )
    prefix = f"{source.keyspace}/"
    shards = tuple(str(row[0])[len(prefix) :] for row in rows if str(row[0]).startswith(prefix))
    if not shards:
        known = sorted({str(row[0]).partition("/")[0] for row in rows})
        raise TailraceError(
            Kind.SOURCE_MISCONFIGURED,
            f"list the shards of the keyspace {source.keyspace!r}: it has none that serve; "
            f"there are the keyspaces {', '.join(known)}",
            "check source.keyspace",
        )
    return shards


def tablets(vtgate: Vtgate, source: VitessSource) -> list[Tablet]:
    """Return the tablets of the keyspace."""
    rows = vtgate.query("show vitess_tablets", "list the tablets", "@primary")
    return [Tablet(*map(str, row[2:5])) for row in rows if row[1] == source.keyspace]


def of_primary(source: VitessSource) -> VitessSource:
    """Return a source whose shards' primaries are asked."""
    return source.model_copy(update={"tablet_type": "primary"})


def ask_gtids(vtgate: Vtgate, source: VitessSource, shard: str) -> Future[list[Row]]:
    """Query the transactions that a shard has executed, and those whose binlogs it has purged: one row."""
    return vtgate.ask(_GTIDS, f"ask the shard {shard} for its GTIDs", _target(source, shard))


def ask_gtids_of_any(
    vtgate: Vtgate, source: VitessSource, shard: str, tablet_type: str = ""
) -> Future[list[Row]]:
    """Like `ask_gtids`, but also for a shard that doesn't serve: its purged transactions are empty then.

    vtgate refuses queries to such a shard, but can still stream it.

    :param tablet_type: the type of the tablet that is asked; empty: the one that is streamed.
    """
    asked = source.model_copy(update={"tablet_type": tablet_type}) if tablet_type else source
    return submit(_gtids_of_any(vtgate, asked, shard))


async def _gtids_of_any(vtgate: Vtgate, source: VitessSource, shard: str) -> list[Row]:
    try:
        return await vtgate.rows(_GTIDS, f"ask the shard {shard} for its GTIDs", _target(source, shard))
    except TailraceError as error:
        if error.policy is not Policy.RETRY:
            raise
        request = pb.VStreamRequest(
            tablet_type=TABLET_TYPES[source.tablet_type], filter=pb.Filter(rules=[pb.Rule(match="/.*")])
        )
        request.vgtid.shard_gtids.add(keyspace=source.keyspace, shard=shard, gtid="current")
        try:
            return [(await asyncio.to_thread(_first_position, vtgate, request, source.connect_timeout), "")]
        except (EOFError, grpc.RpcError):
            raise error from None


def _first_position(vtgate: Vtgate, request: pb.VStreamRequest, deadline_s: float) -> str:
    stream = vtgate.stream(request, deadline_s)
    try:
        for response in stream:
            for event in pb.VStreamResponse.FromString(response).events:
                for position in event.vgtid.shard_gtids:
                    return position.gtid
    finally:
        stream.cancel()
    raise EOFError


def newest_gtids(vtgate: Vtgate, source: VitessSource) -> dict[str, str]:
    """Return the transactions that the primary of each serving shard has executed."""
    asked = {shard: ask_gtids(vtgate, of_primary(source), shard) for shard in serving_shards(vtgate, source)}
    deadline_s = 2 * source.connect_timeout
    return {
        shard: str(answer_of(answer, deadline_s, f"ask the shard {shard} for its position")[0][0] or "")
        for shard, answer in asked.items()
    }


def binlog_settings(vtgate: Vtgate, source: VitessSource, shard: str) -> tuple[str, str, str]:
    """Return `binlog_row_image`, `binlog_format` and `gtid_mode` of a shard."""
    (row,) = vtgate.query(_BINLOG, f"ask the shard {shard} for its settings", _target(source, shard))
    return str(row[0]), str(row[1]), str(row[2])


_CASCADES = (
    "select table_name, constraint_name from information_schema.referential_constraints "
    "where constraint_schema = database() and "
    "(delete_rule in ('CASCADE', 'SET NULL') or update_rule in ('CASCADE', 'SET NULL')) order by 1, 2"
)


def unlogged_cascades(vtgate: Vtgate, source: VitessSource, shard: str) -> list[tuple[str, str]]:
    """Return the tables of a shard whose rows InnoDB changes for a foreign key, each with the key's name: it
    writes no binlog for these changes. With `foreignKeyMode: managed`, vtgate makes them, and there are none.
    """
    keyspaces = vtgate.query("show vschema keyspaces", "ask vtgate for its mode of foreign keys")
    if any(row[0] == source.keyspace and row[2] == "managed" for row in keyspaces):
        return []
    rows = vtgate.query(_CASCADES, f"ask the shard {shard} for its foreign keys", _target(source, shard))
    return [(str(table), str(key)) for table, key in rows]


def table_names(vtgate: Vtgate) -> list[str]:
    """Return the tables of the keyspace."""
    return sorted(str(row[0]) for row in vtgate.query("show tables", "list the tables"))


_COLUMNS = (
    "select c.table_name, c.column_name, c.column_type, c.is_nullable, c.column_key, k.id, "
    "c.character_set_name from information_schema.tables t join information_schema.columns c "
    "on c.table_schema = t.table_schema and c.table_name = t.table_name "
    "left join information_schema.collations k on k.collation_name = c.collation_name "
    "where t.table_schema = database() and t.table_type = 'BASE TABLE' "
    "order by t.table_name, c.ordinal_position"
)
#: Character sets whose collations Vitess does not know: a stream has no number for them.
_UNKNOWN_CHARSETS = frozenset({"big5", "gb18030", "gbk", "tis620"})


def table_columns(vtgate: Vtgate, source: VitessSource, shard: str) -> dict[str, list[pb.Field]]:
    """Return the columns of each table of a shard, as a stream describes them."""
    found: dict[str, list[pb.Field]] = {}
    rows = vtgate.query(_COLUMNS, f"ask the shard {shard} for its columns", _target(source, shard))
    for table, column, declared, nullable, key, collation, charset in rows:
        number = int(collation or 0) if charset not in _UNKNOWN_CHARSETS else 0
        flags = NOT_NULL * (nullable == "NO") | PRIMARY_KEY * (key == "PRI")
        field = pb.Field(name=str(column), column_type=str(declared), charset=number, flags=flags)
        found.setdefault(str(table), []).append(field)
    return found


# Not by `column_key`: MySQL calls a unique key PRI where there is no primary key, and a tablet may copy in
# the order of another one.
_PRIMARY_KEYS = (
    "select t.table_name, c.column_name, c.data_type from information_schema.tables t "
    "left join information_schema.statistics s on s.table_schema = t.table_schema "
    "and s.table_name = t.table_name and s.index_name = 'PRIMARY' "
    "left join information_schema.columns c on c.table_schema = s.table_schema "
    "and c.table_name = s.table_name and c.column_name = s.column_name "
    "where t.table_schema = database() and t.table_type = 'BASE TABLE' order by t.table_name, s.seq_in_index"
)
_INTEGRAL = frozenset({"tinyint", "smallint", "mediumint", "int", "bigint"})


def primary_keys(vtgate: Vtgate, source: VitessSource, shard: str) -> dict[str, dict[str, str]]:
    """Return the primary key of each table of a shard: its columns in order, with their types; no columns for
    a table without a key.
    """
    found: dict[str, dict[str, str]] = {}
    rows = vtgate.query(_PRIMARY_KEYS, f"ask the shard {shard} for its primary keys", _target(source, shard))
    for table, column, kind in rows:
        key = found.setdefault(str(table), {})
        if column is not None:
            key[column] = str(kind)
    return found


def integral_keys(vtgate: Vtgate, source: VitessSource, shard: str) -> dict[str, str]:
    """Return the tables of a shard, each with its key's column; empty if the key isn't one integer column."""
    return {
        table: next(iter(key)) if len(key) == 1 and _INTEGRAL.issuperset(key.values()) else ""
        for table, key in primary_keys(vtgate, source, shard).items()
    }


def views(vtgate: Vtgate, source: VitessSource, shard: str) -> frozenset[str]:
    """Return the views of a shard."""
    sql = "select table_name from information_schema.views where table_schema = database()"
    rows = vtgate.query(sql, f"ask the shard {shard} for its views", _target(source, shard))
    return frozenset(str(row[0]) for row in rows)


def ask_key_range(
    vtgate: Vtgate, source: VitessSource, shard: str, table: str, column: str, rows_max: int
) -> Future[list[Row]]:
    """Query the least and the largest key of a shard's table, and its number of rows, at most `rows_max`."""
    key, name = quoted(column), quoted(table)
    some = f"select 1 from {name} limit {rows_max}"  # noqa: S608 - quoted
    sql = f"select min({key}), max({key}), (select count(*) from ({some}) as some) from {name}"  # noqa: S608
    return vtgate.ask(sql, f"ask the shard {shard} for the keys of {table}", _target(source, shard))


def release(vtgate: Vtgate) -> int:
    """Return vtgate's major version; 0: it is not known."""
    rows = vtgate.query("select @@version_comment", "ask vtgate for its version")
    found = re.match(r"Version: v?(\d+)\.", str(rows[0][0] or "")) if rows else None
    return int(found[1]) if found is not None else 0


def ask_last_key(
    vtgate: Vtgate, source: VitessSource, shard: str, table: str, key: Sequence[str]
) -> Future[pb.QueryResult]:
    """Query the last primary key of a shard's table: no row, or one."""
    columns = ", ".join(map(quoted, key))
    order = ", ".join(f"{quoted(name)} desc" for name in key)
    sql = f"select {columns} from {quoted(table)} order by {order} limit 1"  # noqa: S608 - quoted
    attempted = f"ask the shard {shard} for the last row of {table}"
    return vtgate.ask_result(sql, attempted, _target(source, shard))


def quoted(name: str) -> str:
    """Return a name as an SQL identifier in backquotes."""
    return "`" + name.replace("`", "``") + "`"


def _target(source: VitessSource, shard: str) -> str:
    return f"{source.keyspace}:{shard}@{source.tablet_type}"
