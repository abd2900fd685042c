"""What converters to JSON have in common: the names of the source, and the values' documents."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from tailrace import __version__
from tailrace.converters.cells.change_table import (
    COMMIT_LSN,
    MS,
    NS,
    TABLE_ORDER,
    US,
    ChangeTable,
    Field,
    columns_of,
)
from tailrace.converters.cells.from_columns import of_columns
from tailrace.converters.cells.from_wire import of_wire
from tailrace.converters.event_plan import Planned
from tailrace.protocol.frames import Numbers
from tailrace.records.group import Group
from tailrace.sources.postgres.decode import kernel
from tailrace.sources.postgres.decode.json.debezium import SourceInfo
from tailrace.sources.postgres.decode.json.documents import Template, write

#: What a source is called of which nothing is known.
UNKNOWN = SourceInfo("tailrace", "", __version__)


def picture_of(group: Group) -> ChangeTable:
    """Return the picture of a group of changes.

    :raises TailraceError: `DECODE_FAILED`.
    """
    found = of_columns(group) if group.wire is None else of_wire(group.wire.tuples_in_utf8())
    if group.earlier and len(found):
        # The transaction that the group goes on with is counted on.
        of_commit = found.numbers[COMMIT_LSN]
        found.numbers[TABLE_ORDER, of_commit == of_commit[0]] += group.earlier
    return found


def facts_of(group: Group, topic_prefix: str) -> SourceInfo:
    """Return what the group's source is called, with the prefix of one's choice."""
    known = group.origin or UNKNOWN
    return SourceInfo(topic_prefix or known.name, known.database, known.version, known.connector)


def is_filled(rows_in_part: str | None, *, with_schema: bool) -> bool:
    """Tell whether rows that were sent in part get all of their columns."""
    return with_schema if rows_in_part is None else rows_in_part == "filled"


def write_values(
    picture: ChangeTable, planned: Planned, template: Template, *, filled: bool, now_ns: Callable[[], int]
) -> pa.Array:
    """Return a document for each event, of this template; null for tombstones.

    :param filled: whether rows that were sent in part get all columns.
    :raises TailraceError: `DECODE_FAILED` if a text is not UTF-8.
    """
    fields = picture.row.fields
    unavailable = [field.how.unavailable(picture.modes.unavailable_placeholder) for field in fields]
    absent = [""] * len(fields)
    if filled:
        absent = [_absent(field) for field in picture.fields] + [""] * (len(fields) - len(picture.fields))
    return write(
        picture.row.buffer, planned.plan, template, with_times(picture, now_ns),
        columns_of(picture.row, unavailable, absent), picture.row.old, picture.row.current,
    )  # fmt: skip


def _absent(field: Field) -> str:
    return field.how.zero if field.not_null else "null"


def with_times(picture: ChangeTable, now_ns: Callable[[], int]) -> Numbers:
    """Return the picture's numbers, the clock's time for changes that have none."""
    # Debezium, too, takes the clock's time where a change has none.
    missing = picture.numbers[US] == kernel.NONE
    if not missing.any():
        return picture.numbers
    numbers, now = picture.numbers.copy(), now_ns()
    for row, unit in ((MS, 1_000_000), (US, 1000), (NS, 1)):
        numbers[row] = np.where(missing, now // unit, numbers[row])
    return numbers
