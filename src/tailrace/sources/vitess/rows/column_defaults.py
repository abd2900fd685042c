"""The value of an added column in older rows: MySQL's default, which no event contains.

By the time of the query the column may have another default, or none: migrations add a column with a default,
and drop it at once. If InnoDB added the column without writing rows (`ALGORITHM=INSTANT`), it stores the
value of older rows.

Source: MySQL manual, "The INFORMATION_SCHEMA COLUMNS Table", "The INFORMATION_SCHEMA INNODB_COLUMNS Table",
"Data Type Default Values".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tailrace.errors import Policy, TailraceError
from tailrace.sources.vitess.rows import layout
from tailrace.sources.vitess.rows.types import NO_DEFAULT, ColumnPlan
from tailrace.sources.vitess.rows.values import GROWTH, room_of, write_alone


@dataclass(frozen=True, slots=True)
class ColumnDefault:
    """The value of a column in rows older than the column: `text`, None for NULL; or it is not known."""

    text: str | None = None
    is_known: bool = True


UNKNOWN = ColumnDefault(is_known=False)

_NO_POINTS = np.zeros(0, np.int32)

#: A column in information_schema: `column_default` and `extra`; with the privilege PROCESS, also
#: `has_default` and `default_value` of InnoDB.
DefaultRow = tuple[str | None, ...]
#: Given a shard, a table and a column, returns its row; None: the column no longer exists.
DefaultOf = Callable[[str, str, str], DefaultRow | None]

#: Given SQL, a description for errors, and a shard as a target, returns the rows.
Query = Callable[[str, str, str], list[tuple[str | None, ...]]]


_COLUMNS = "select c.column_name, c.column_default, c.extra from information_schema.columns c"
_WITH_STORED = (
    "select c.column_name, c.column_default, c.extra, i.has_default, i.default_value "
    "from information_schema.columns c left join (information_schema.innodb_tables t "
    "join information_schema.innodb_columns i on i.table_id = t.table_id) "
    "on t.name = concat(c.table_schema, '/', c.table_name) and i.name = c.column_name"
)

_INTEGER = re.compile(r"(?:tiny|small|medium|big)?int\b")
_CHARACTERS = re.compile(r"(?:var)?char\b")


def asked_by(
    query: Query,
    keyspace: str,
    tablet_type: str,
    serving: Callable[[str], Sequence[str]] = lambda shard: (shard,),
) -> DefaultOf:
    """Return a function that asks the shard itself: other shards, and the replica that is asked first, may
    not have the column yet; the primary has.

    A shard that is read up to its journal after a switch of traffic doesn't answer: a shard that took over is
    asked, which has the same columns.

    :param serving: returns the shards that serve the keys of a shard.
    """

    def asked(shard: str, where: str, column: str) -> DefaultRow | None:
        attempted = f"ask the shard {shard!r} for a column's default"
        for of in dict.fromkeys((tablet_type.lower(), "primary")):
            target = f"{keyspace}:{shard}@{of}"
            try:
                found = query(f"{_WITH_STORED} {where}", attempted, target)
            except TailraceError:  # perhaps because the user lacks the privilege PROCESS
                found = query(f"{_COLUMNS} {where}", attempted, target)
            for name, *row in found:
                if name == column:  # MySQL's comparison ignores case
                    return tuple(row)
        return None

    def default_of(shard: str, table: str, column: str) -> DefaultRow | None:
        names = f"c.table_name = {_quoted(table)} and c.column_name = {_quoted(column)}"
        where = f"where c.table_schema = database() and {names}"
        try:
            return asked(shard, where, column)
        except TailraceError as error:
            others = serving(shard) if error.policy is Policy.RETRY else ()
            if not others or shard in others:
                raise
            return asked(others[0], where, column)

    return default_of


def _quoted(name: str) -> str:
    return "'" + name.replace("\\", "\\\\").replace("'", "''") + "'"


def default_of_added(plan: ColumnPlan, row: DefaultRow | None) -> ColumnDefault:
    """Return the column's value in older rows, derived from its row in information_schema."""
    if row is None:
        return UNKNOWN
    default, extra, *stored = row
    extra = (extra or "").lower()
    if "generated" in extra or "auto_increment" in extra:
        return UNKNOWN  # an expression, such as CURRENT_TIMESTAMP, or a different number in each row
    if stored[:1] == ["1"]:
        value = stored[1]
        if (known := _stored(plan, value)) is not None:
            return known
        is_zero = plan.not_null and set((value or "").removeprefix("8")) <= {"0"}
        if default is None and not is_zero:
            return UNKNOWN  # it had a default
    if default is not None:
        text = _written(plan, default)
        return UNKNOWN if text is None else ColumnDefault(text)
    if not plan.not_null:
        return ColumnDefault(None)
    # A column that is NOT NULL and has no default gets its type's zero.
    is_bare = plan.flags & NO_DEFAULT and plan.implicit is not None
    return ColumnDefault(plan.implicit) if is_bare else UNKNOWN


def _stored(plan: ColumnPlan, value: str | None) -> ColumnDefault | None:
    """Return InnoDB's value for older rows, given its bytes in hex; None if the type is not supported."""
    if value is None:
        return ColumnDefault(None)
    if _INTEGER.match(plan.declared):
        half = 0 if "unsigned" in plan.declared else 1 << 4 * len(value) - 1
        return ColumnDefault(str(int(value, 16) - half))
    if plan.code == layout.PLAIN and _CHARACTERS.match(plan.declared):
        text = bytes.fromhex(value).decode()
        return ColumnDefault(text.rstrip(" ") if plan.declared.startswith("char") else text)
    return None


def _written(plan: ColumnPlan, default: str) -> str | None:
    value = default.encode()
    code = plan.code
    if code == layout.UTC:
        return None  # it is in the time zone of the querying session
    if code == layout.BITS:
        number = default.removeprefix("b'").removesuffix("'")
        return number.zfill(plan.parameter) if set(number) <= {"0", "1"} else None
    if code in (layout.HEX, layout.PADDED_HEX):
        value = bytes.fromhex(default[2:]) if default.startswith("0x") else value
    elif code not in (layout.NUMBER, layout.FLOAT4, layout.FLOAT8):
        return default  # already in Unicode
    source = np.frombuffer(value, np.uint8)
    out = np.empty(GROWTH * len(value) + room_of(code, plan.parameter), np.uint8)
    end = write_alone(source, code, plan.parameter, _NO_POINTS, out)
    return out[:end].tobytes().decode()
