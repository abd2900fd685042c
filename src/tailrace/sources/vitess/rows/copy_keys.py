"""Primary keys behind which a table is copied: creates and compares them, and converts them to text.

If a stream names a table with a key, it copies the rows behind the key, and sends all changes of the table
meanwhile. Without a key, it sends no changes until the table's copy begins. So a table of which the log has
rows is always named with a key: one before all rows, if all are to be read.

Source: `uvstreamer.go`, `copy.go` and `rowstreamer.go` of Vitess; `query.proto` for the numbers of types.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

from tailrace.errors import Kind, TailraceError
from tailrace.sources.vitess.connection import vstream_pb2 as pb

_INTEGRAL, _INT64 = 256, 265


def key_text(table: str, key: pb.QueryResult) -> str:
    """Return a key, its columns and at most one row, as text."""
    return base64.b64encode(pb.TableLastPk(table_name=table, last_pk=key).SerializeToString()).decode()


def key_before(table: str, column: str, value: int) -> str:
    """Return, as text, the key of one integer column behind which the rows from `value` on lie."""
    text = str(value - 1).encode()
    row = pb.Row(lengths=[len(text)], values=text)
    return key_text(table, pb.QueryResult(fields=[pb.Field(name=column, type=_INT64)], rows=[row]))


def own_position(vgtid: bytes, shard: str) -> pb.ShardGtid | None:
    """Return the position of a shard in a VGTID, which has all shards of its stream; None: it has none."""
    found = pb.VGtid.FromString(vgtid).shard_gtids
    return next((position for position in found if position.shard == shard), None)


def last_keys(position: pb.ShardGtid) -> dict[str, str]:
    """Return the keys that a position names, as text, by table."""
    return {
        table.table_name: base64.b64encode(table.SerializeToString()).decode() for table in position.table_pks
    }


def before_all(fields: Sequence[pb.Field]) -> pb.QueryResult:
    """Return a key before every row: it has no row, so that the server copies the table from its start.

    :param fields: columns of the table, of which the key has one: the server refuses a key without any.
    """
    return pb.QueryResult(fields=[pb.Field(name=each.name, type=each.type) for each in fields[:1]])


def common_key(keys: Sequence[str | None]) -> str | None:
    """Return the key behind which a table is copied in a shard that took over from several.

    :param keys: the keys of those shards for the table; None: its copy had not begun.
    :returns: None if the table is to be copied from its start.
    """
    found = [key for key in keys if key is not None]
    if not found:
        return None
    if len(set(keys)) == 1:
        return found[0]
    if len(found) == len(keys) and (numbers := [_numbers(key) for key in found]) and None not in numbers:
        return min(zip(numbers, found, strict=True), key=lambda each: each[0] or ())[1]
    one = _parsed(found[0])
    return key_text(one.table_name, before_all(one.last_pk.fields)) if one.last_pk.fields else None


def whole_number(key: str) -> int:
    """Return the value of a key of one integer column.

    :raises TailraceError: `PROTOCOL_VIOLATION` if it is not such a key.
    """
    numbers = _numbers(key)
    if numbers is None or len(numbers) != 1:
        table = _parsed(key).table_name
        raise TailraceError(
            Kind.PROTOCOL_VIOLATION,
            f"continue the copy of the table {table}: its last key is not one whole number",
            "report it, with the table's definition",
            {"table": table},
        )
    return numbers[0]


def _parsed(key: str) -> pb.TableLastPk:
    return pb.TableLastPk.FromString(base64.b64decode(key))


def _numbers(key: str) -> tuple[int, ...] | None:
    """Return a key's values, which sort as in MySQL; None if they are not all integers."""
    given = _parsed(key).last_pk
    if not given.rows or not all(field.type & _INTEGRAL for field in given.fields):
        return None
    texts: list[bytes] = []
    at = 0
    for length in given.rows[0].lengths:
        texts.append(given.rows[0].values[at : at + max(length, 0)])
        at += max(length, 0)
    try:
        return tuple(int(text) for text in texts)
    except ValueError:
        return None
