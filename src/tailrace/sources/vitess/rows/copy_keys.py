"""Primary keys behind which a table is copied: creates and compares them, and converts them to text.

If a stream names a table with a key, it copies the rows behind the key, and sends all changes of the table
meanwhile. Without a key, it sends no changes until the table's copy begins. So a table of which the log has
rows is always named with a key: one before all rows, if all are to be read.

Source: `uvstreamer.go` and `rowstreamer.go` of Vitess; `query.proto` for the numbers of types.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

from tailrace.errors import Kind, TailraceError
from tailrace.sources.vitess.connection import vstream_pb2 as pb

_INTEGRAL, _UNSIGNED, _QUOTED, _TEXT, _BINARY = 256, 512, 2048, 4096, 8192
_INT64, _DECIMAL = 265, 18
_LEAST_DECIMAL = "-1" + "0" * 65
#: Values for types that MySQL compares only with valid texts, by number: timestamp, date, time, datetime.
_MOMENTS = {2061: "2000-01-01", 2062: "2000-01-01", 2063: "00:00:00", 2064: "2000-01-01"}


def key_text(table: str, key: pb.QueryResult) -> str:
    """Return a key, its columns and one row, as text."""
    return base64.b64encode(pb.TableLastPk(table_name=table, last_pk=key).SerializeToString()).decode()


def key_before(table: str, column: str, value: int) -> str:
    """Return, as text, the key of one integer column behind which the rows from `value` on lie."""
    text = str(value - 1).encode()
    row = pb.Row(lengths=[len(text)], values=text)
    return key_text(table, pb.QueryResult(fields=[pb.Field(name=column, type=_INT64)], rows=[row]))


def before_all(fields: Sequence[pb.Field]) -> pb.QueryResult | None:
    """Return a key that lies before every row; None if the first column's type has no such value.

    For a text column it is the empty text: a row whose key is empty itself is not behind it.
    """
    first = fields[0].type
    if first & _INTEGRAL:
        least = "-1" if first & _UNSIGNED else str(-(1 << 63))
    elif first == _DECIMAL:
        least = _LEAST_DECIMAL
    elif first & _QUOTED and first & (_TEXT | _BINARY):
        least = ""
    else:
        return None
    # Further columns matter only for rows that are equal in the first one: there are none.
    return _key(fields, [least, *map(_some_value, fields[1:])])


def some_key(fields: Sequence[pb.Field]) -> pb.QueryResult:
    """Return a key for a table without rows: of new rows, changes are sent up to it, copies behind it."""
    return _key(fields, list(map(_some_value, fields)))


def _some_value(field: pb.Field) -> str:
    return _MOMENTS.get(field.type, "" if field.type & _QUOTED else "0")


def _key(fields: Sequence[pb.Field], values: Sequence[str]) -> pb.QueryResult:
    row = pb.Row(lengths=[len(value) for value in values], values="".join(values).encode())
    return pb.QueryResult(fields=fields, rows=[row])


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
    least = before_all(one.last_pk.fields) if one.last_pk.fields else None
    return None if least is None else key_text(one.table_name, least)


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
