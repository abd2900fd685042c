"""What rows from before a column was added have in it: MySQL's default, which no event tells.

Source: MySQL manual, "The INFORMATION_SCHEMA COLUMNS Table", "Data Type Default Values".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tailrace.errors import Policy, TailraceError
from tailrace.sources.vitess.rows import layout
from tailrace.sources.vitess.rows.types import NO_DEFAULT, ColumnPlan
from tailrace.sources.vitess.rows.values import GROWTH, room_of, write_alone


@dataclass(frozen=True, slots=True)
class ColumnDefault:
    """What rows from before a column have in it: `text`, None for NULL; or nobody knows."""

    text: str | None = None
    is_known: bool = True


UNKNOWN = ColumnDefault(is_known=False)

_NO_POINTS = np.zeros(0, np.int32)

#: Given a shard, a table and a column: `column_default` and `extra` of information_schema; None: it has no
#: such column any more.
DefaultOf = Callable[[str, str, str], tuple[str | None, str] | None]

#: Given SQL, what is attempted, and a shard as a target: the rows.
Query = Callable[[str, str, str], list[tuple[str | None, ...]]]


_COLUMNS = "select column_default, extra from information_schema.columns"


def asked_by(
    query: Query,
    keyspace: str,
    tablet_type: str,
    serving: Callable[[str], Sequence[str]] = lambda shard: (shard,),
) -> DefaultOf:
    """Return what asks the shard itself: others may not have the column yet. Nor may another replica: the
    primary has it first.

    One that is read up to its journal after traffic was switched does not answer: one that took over has its
    columns.

    :param serving: returns the shards that serve the keys of a shard.
    """

    def asked(shard: str, sql: str) -> list[tuple[str | None, ...]]:
        attempted = f"ask the shard {shard!r} for a column's default"
        for of in dict.fromkeys((tablet_type.lower(), "primary")):
            if found := query(sql, attempted, f"{keyspace}:{shard}@{of}"):
                return found
        return []

    def default_of(shard: str, table: str, column: str) -> tuple[str | None, str] | None:
        names = f"table_name = {_quoted(table)} and column_name = {_quoted(column)}"
        sql = f"{_COLUMNS} where table_schema = database() and {names}"
        try:
            found = asked(shard, sql)
        except TailraceError as error:
            others = serving(shard) if error.policy is Policy.RETRY else ()
            if not others or shard in others:
                raise
            found = asked(others[0], sql)
        return (found[0][0], found[0][1] or "") if found else None

    return default_of


def _quoted(name: str) -> str:
    return "'" + name.replace("\\", "\\\\").replace("'", "''") + "'"


def default_of_added(plan: ColumnPlan, told: tuple[str | None, str] | None) -> ColumnDefault:
    """Return what rows from before a column have, of what information_schema says of it."""
    if told is None:
        return UNKNOWN
    default, extra = told
    if "generated" in extra.lower() or "auto_increment" in extra.lower():
        return UNKNOWN  # an expression, CURRENT_TIMESTAMP among them, or a number of each row's own
    if default is not None:
        text = _written(plan, default)
        return UNKNOWN if text is None else ColumnDefault(text)
    if not plan.not_null:
        return ColumnDefault(None)
    # MySQL gives a column that may not be NULL and has no default its type's zero.
    is_bare = plan.flags & NO_DEFAULT and plan.implicit is not None
    return ColumnDefault(plan.implicit) if is_bare else UNKNOWN


def _written(plan: ColumnPlan, default: str) -> str | None:
    value = default.encode()
    code = plan.code
    if code == layout.UTC:
        return None  # in the time zone of the session that asks
    if code == layout.BITS:
        number = default.removeprefix("b'").removesuffix("'")
        return number.zfill(plan.parameter) if set(number) <= {"0", "1"} else None
    if code in (layout.HEX, layout.PADDED_HEX):
        value = bytes.fromhex(default[2:]) if default.startswith("0x") else value
    elif code not in (layout.NUMBER, layout.FLOAT4, layout.FLOAT8):
        return default  # in Unicode already
    source = np.frombuffer(value, np.uint8)
    out = np.empty(GROWTH * len(value) + room_of(code, plan.parameter), np.uint8)
    end = write_alone(source, code, plan.parameter, _NO_POINTS, out)
    return out[:end].tobytes().decode()
