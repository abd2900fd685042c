"""The row instead of the change: what Debezium calls the new record state.

A change that has a row becomes a record whose value is the row after it, with whatever of its
metadata is asked for; a delete is dropped, becomes a tombstone, or keeps its old row with a mark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.config.transformations import options
from tailrace.decode.postgres_types import OIDS
from tailrace.decode.types import known_type
from tailrace.model import OWN_FORMS, Relation
from tailrace.records.group import Group
from tailrace.transforms.fields import failure, specials_of_values
from tailrace.transforms.groups.rows import metadata_column, not_sent
from tailrace.transforms.groups.values import either, members, struct_of
from tailrace.transforms.headers import with_headers
from tailrace.transforms.selection import Chosen, Operations

_DELETES, _TRUNCATES, _MESSAGES = Operations("d"), Operations("t"), Operations("m")

#: Types whose values can be large, and are no texts in events.
_OTHERS = frozenset({OIDS["numeric"], OIDS["bit"], OIDS["varbit"]})

#: Added by `rewrite`: whether the row was deleted, as Debezium's text.
DELETED = "__deleted"


@dataclass(frozen=True, slots=True)
class Flatten:
    """Takes rows out of changes."""

    given: options.FlattenConfig

    def apply(self, group: Group) -> list[Group]:
        """Return the rows; messages, and records that are no changes, stay as they are.

        :raises TailraceError: `TRANSFORM_FAILED` at a truncate that may not be dropped.
        """
        if not group.is_change or _MESSAGES.matches(group).any():
            return [group]
        truncated = _TRUNCATES.matches(group)
        if truncated.any() and self.given.truncates == "error":
            raise failure(
                group,
                "flatten changes: the table was truncated, and a truncate has no row",
                "set truncates: drop, or take truncates out before by a predicate of operations",
            )
        deleted = _DELETES.matches(group)
        kept = ~truncated if self.given.deletes != "drop" else ~truncated & ~deleted
        if not kept.any():
            return []
        part = group.take(np.flatnonzero(kept))
        return [self._flattened(part, deleted[kept])]

    def _flattened(self, group: Group, is_deleted: Chosen) -> Group:
        given, rows, deleted = self.given, group.column("after"), pa.array(is_deleted)
        if given.deletes == "rewrite":
            rows = _either(group, is_deleted, rows)
        absent = pc.is_null(rows) if rows.null_count else None
        found = members(rows) if pa.types.is_struct(rows.type) else {}
        if given.unavailable == "placeholder":
            found = _with_placeholders(group, found)
        if given.deletes == "rewrite":
            found[DELETED] = pc.if_else(deleted, "true", "false")
        found |= _metadata(group, given.add_fields, given.add_fields_prefix)
        columns = {
            "op": group.column("op"),
            "key": group.column("key"),
            "value": struct_of(found, absent, len(group)),
            "source": group.column("source"),
            "headers": group.headers,
            "special": specials_of_values(group.column("special"), is_deleted),
            "unchanged": group.column("unchanged"),
        }
        made = group.with_columns(pa.RecordBatch.from_pydict(columns))
        added = _metadata(group, given.add_headers, given.add_headers_prefix)
        return with_headers(made, added) if added else made


def _metadata(group: Group, wanted: Sequence[str], prefix: str) -> dict[str, pa.Array]:
    """Return what is asked for by what it is called: `op`, `source.ts_ms`, `op:operation`."""
    found = {}
    for each in wanted:
        what, colon, other = each.partition(":")
        found[prefix + (other if colon else what.replace(".", "_"))] = metadata_column(group, what)
    return found


def _either(group: Group, is_deleted: Chosen, after: pa.Array) -> pa.Array:
    try:
        return either(is_deleted, group.column("before"), after)
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        # Arrow's message may quote a value.
        raise failure(
            group,
            "flatten changes: a column has another type in the row before than in the row after",
            "have the transformations before this one treat both rows alike",
        ) from None


def _holds_text(relation: Relation | None, name: str, arrow: pa.DataType) -> bool:
    if not pa.types.is_string(arrow) or relation is None:
        return bool(pa.types.is_string(arrow) or pa.types.is_binary(arrow))
    # Numbers and bits may be texts here, but not in events: their schemas say what they are.
    others = _OTHERS if relation.modes.decimal != "string" else _OTHERS - {OIDS["numeric"]}
    return not any(c.name == name and known_type(c).oid in others for c in relation.columns)


def _with_placeholders(group: Group, found: dict[str, pa.Array]) -> dict[str, pa.Array]:
    # As in Debezium's JSON: a value that was not sent is shown by a text, where the column can hold one.
    unchanged = group.column("unchanged")
    if pa.types.is_null(unchanged.type):
        return found
    modes = OWN_FORMS if group.relation is None else group.relation.modes
    for name in unchanged.flatten().unique().to_pylist():
        values = found.get(name)
        if values is None or not _holds_text(group.relation, name, values.type):
            continue
        text = pa.scalar(modes.unavailable_placeholder).cast(values.type)
        found[name] = pc.if_else(pa.array(not_sent(group, [name])), text, values)
    return found
