"""A mirror's rows are all given in one form, or the mirror stops.

A mirror keeps rows that no later change touches. Were a handling mode changed that leaves a column's
type as it is, such as bytes in hexadecimal that were base64, rows in two forms would stand beside
each other, and a row would not be found by a key that is written otherwise. So the target remembers
what becomes of a sample of each type that a mode concerns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from tailrace.decode.gather import Cells
from tailrace.decode.kernel import TEXT
from tailrace.decode.postgres_types import OIDS, item_of
from tailrace.decode.types import column_types, known_type
from tailrace.errors import Kind, TailraceError
from tailrace.model import Relation, ValueType
from tailrace.sinks.target import Target

if TYPE_CHECKING:
    from tailrace.sinks.delta_sink import TableWork

_FILE = "forms.json"

# Types whose values in typed columns depend on a mode that may leave the column's type as it is.
_SAMPLES = {
    OIDS["money"]: "$1,234.56",
    OIDS["bytea"]: "\\xfbff00",
    OIDS["time"]: "01:02:03.004005",
    OIDS["timetz"]: "01:02:03.004005+01:30",
    OIDS["interval"]: "1 year 2 mons 3 days 04:05:06.007008",
}
_SAMPLES_BY_NAME = {"hstore": '"a"=>"1"'}


def require_same_forms(target: Target, work: Iterable[TableWork]) -> None:
    """Check that values are given as they were, and remember how new columns are.

    Before anything of `work` is committed.

    :raises TailraceError: `SINK_SCHEMA_REFUSED`, `SINK_WRITE_FAILED`.
    """
    known = target.read(_FILE) or {}
    found = dict(known)
    for each in work:
        relation = each.files[-1].source
        before: dict[str, str] = known.get(str(relation.oid), {})
        now = _marks(relation)
        changed = [name for place, (name, mark) in now.items() if before.get(place, mark) != mark]
        if changed and each.folder.exists():
            raise TailraceError(
                Kind.SINK_SCHEMA_REFUSED,
                f"mirror a table: a handling mode gives {', '.join(map(repr, changed))} in another form than "
                "the mirror's rows have",
                "restore the source's handling modes; or give the sink a new, empty path, so that it reads "
                "the log from its start",
                {"sink": target.sink, "table": relation.qualified_name},
            )
        if now:
            found[str(relation.oid)] = before | {place: mark for place, (_, mark) in now.items()}
    if found != known:
        target.write(_FILE, found)


def _marks(relation: Relation) -> dict[str, tuple[str, str]]:
    """Return, by column and type, the column's name and what becomes of the type's sample."""
    marks = {}
    for column, kind in zip(relation.columns, column_types(relation), strict=True):
        value = known_type(column)
        sample = _sample(value)
        if sample:
            text = sample.encode()
            cells = Cells(
                np.frombuffer(text, np.uint8),
                np.array([0], np.int32),
                np.array([len(text)], np.int32),
                np.array([TEXT], np.uint8),
            )
            place = f"{column.number or column.name} {column.type_oid} {column.type_modifier}"
            marks[place] = column.name, str(kind.read(cells).values[0].as_py())
    return marks


def _sample(value: ValueType) -> str:
    found = item_of(value)
    if found is not None:
        inner = _sample(found[0]).replace("\\", "\\\\").replace('"', '\\"')
        return f'{{"{inner}"}}' if inner else ""
    return _SAMPLES.get(value.oid) or _SAMPLES_BY_NAME.get(value.name, "")
