"""The errors for rows of Vitess that can't be transcoded, with their hints."""

from __future__ import annotations

from tailrace.errors import Kind, TailraceError
from tailrace.sources.vitess.connection import vstream_pb2 as pb
from tailrace.sources.vitess.rows import layout
from tailrace.sources.vitess.rows.types import Refused, Unnamed

_REPORT = "nothing of it was stored; if it happens again, please report it with Vitess' version"
_THERE = "on the shard's MySQL servers, before its keys are copied again"
_FULL = f"SET PERSIST binlog_row_image = FULL {_THERE}"

_FAILURES = {
    layout.BROKEN: (
        Kind.PROTOCOL_VIOLATION,
        "a message of VStream is cut short or has an impossible length",
        _REPORT,
    ),
    layout.UNKNOWN_EVENT: (
        Kind.PROTOCOL_VIOLATION,
        "an event has a type that this version does not know",
        "use a newer version of Tailrace",
    ),
    layout.STATEMENTS: (
        Kind.SOURCE_MISCONFIGURED,
        "a change was sent as a statement, not as rows, or was rolled back",
        f"SET PERSIST binlog_format = ROW {_THERE}",
    ),
    layout.NO_TRANSACTION: (Kind.PROTOCOL_VIOLATION, "a row is outside a transaction", _REPORT),
    layout.BEGUN_AGAIN: (
        Kind.SOURCE_UNREACHABLE,
        "a transaction begins inside another one, whose rest vtgate did not get",
        "it is retried, from before that transaction",
    ),
    layout.NO_TABLE: (Kind.SCHEMA_MISSING, "no FIELD event describes the table of a row", _REPORT),
    layout.OTHER_COLUMNS: (
        Kind.SCHEMA_CHANGED,
        "a row has another number of columns than its table",
        "start vttablet with --track_schema_versions, or take the table's rows with a new snapshot",
    ),
    layout.NO_IMAGE: (
        Kind.PROTOCOL_VIOLATION,
        "a change has neither the row before nor the row after",
        _REPORT,
    ),
    layout.LACKS_VALUES: (
        Kind.SOURCE_MISCONFIGURED,
        "an inserted row lacks some of its values, so binlog_row_image is MINIMAL",
        _FULL,
    ),
    layout.LACKS_KEY: (Kind.SOURCE_MISCONFIGURED, "a row lacks its primary key", _FULL),
    layout.ODD_POSITION: (Kind.PROTOCOL_VIOLATION, "a position has characters that no GTID has", _REPORT),
    layout.NEEDS_JSON: (
        Kind.SOURCE_MISCONFIGURED,
        "a JSON document was sent as a change of the previous one, which was not sent",
        f"SET PERSIST binlog_row_value_options = '' {_THERE}",
    ),
}


def failure(
    code: int, keyspace: str, shard: str, table: str = "", column: str = "", *, kind: int = -1
) -> TailraceError:
    """Return the error for the code with which the kernel stopped."""
    error, found, hint = _FAILURES[code]
    context: dict[str, object] = {"shard": f"{keyspace}/{shard}"}
    if table and code not in _OF_NO_TABLE:
        context["table"] = f"{keyspace}.{table}"
    if column and code in _OF_A_COLUMN:
        context["column"] = column
    if code == layout.UNKNOWN_EVENT:
        context["event"] = kind
    elif code == layout.STATEMENTS:
        context["event"] = pb.EventType.Name(kind)
    return TailraceError(error, f"read the stream of the shard {shard!r}: {found}", hint, context)


_OF_NO_TABLE = frozenset({
    layout.BROKEN, layout.UNKNOWN_EVENT, layout.STATEMENTS, layout.NO_TABLE, layout.ODD_POSITION,
    layout.BEGUN_AGAIN,
})  # fmt: skip
_OF_A_COLUMN = frozenset({layout.LACKS_VALUES, layout.LACKS_KEY, layout.NEEDS_JSON})


def refused(reason: Refused, keyspace: str, shard: str, table: str, column: str) -> TailraceError:
    """Return the error for a column that can't be transcoded."""
    found, hint = reason.args
    return TailraceError(
        Kind.SCHEMA_CHANGED if isinstance(reason, Unnamed) else Kind.DECODE_FAILED,
        f"describe the column {column!r} of the table {keyspace}.{table} on the shard {shard!r}: {found}",
        hint,
        {"table": f"{keyspace}.{table}", "column": column, "shard": f"{keyspace}/{shard}"},
    )
