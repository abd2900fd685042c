"""Replaces a change by its row: what Debezium calls new record state extraction.

A change of a row becomes a record whose value is the row after, with the metadata that the options
name; a delete is dropped, becomes a tombstone, or becomes its old row with a field that marks it.
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
from tailrace.records.group import Flags, Group
from tailrace.transforms.fields import failure, specials_of_values
from tailrace.transforms.groups.rows import metadata_column, not_sent
from tailrace.transforms.groups.values import either, members, struct_of
from tailrace.transforms.headers import with_headers
from tailrace.transforms.selection import Operations

_DELETES, _TRUNCATES, _MESSAGES = Operations("d"), Operations("t"), Operations("m")

#: Types whose values can be large, and are not texts in events.
_OTHERS = frozenset({OIDS["numeric"], OIDS["bit"], OIDS["varbit"]})

#: Field that `rewrite` adds: whether the row was deleted, as the text that Debezium writes.
DELETED = "__deleted"


@dataclass(frozen=True, slots=True)
class Flatten:
    """Replaces changes by their rows."""

    given: options.FlattenConfig

    def apply(self, group: Group) -> list[Group]:
        """Return the rows; messages, and records that are not changes, stay unchanged.

        :raises TailraceError: `TRANSFORM_FAILED` for a truncate if `truncates` is `error`.
        """
        if not group.is_change or _MESSAGES.matches(group).any():
            return [group]
        truncated = _TRUNCATES.matches(group)
        if truncated.any() and self.given.truncates == "error":
            raise failure(
                group,
                "flatten changes: the table was truncated, and a truncate has no row",
                "set truncates: drop, or drop truncates in an earlier step with a predicate of operations",
            )
        deleted = _DELETES.matches(group)
        kept = ~truncated if self.given.deletes != "drop" else ~truncated & ~deleted
        if not kept.any():
            return []
        part = group.take(np.flatnonzero(kept))
        return [self._flattened(part, deleted[kept])]

    def _flattened(self, group: Group, is_deleted: Flags) -> Group:
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
            "partial": group.column("partial"),
        }
        made = group.with_columns(pa.RecordBatch.from_pydict(columns))
        added = _metadata(group, given.add_headers, given.add_headers_prefix)
        return with_headers(made, added) if added else made


def _metadata(group: Group, wanted: Sequence[str], prefix: str) -> dict[str, pa.Array]:
    """Return the metadata in `wanted`, by field name; entries: `op`, `source.ts_ms`, `op:operation`."""
    found = {}
    for each in wanted:
        what, colon, other = each.partition(":")
        found[prefix + (other if colon else what.replace(".", "_"))] = metadata_column(group, what)
    return found


def _either(group: Group, is_deleted: Flags, after: pa.Array) -> pa.Array:
    try:
        return either(is_deleted, group.column("before"), after)
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        # Arrow's message may quote a value.
        raise failure(
            group,
            "flatten changes: a column has another type in the row before than in the row after",
            "apply the transformations before this one to both rows in the same way",
        ) from None


def _holds_text(relation: Relation | None, name: str, arrow: pa.DataType) -> bool:
    if not pa.types.is_string(arrow) or relation is None:
        return bool(pa.types.is_string(arrow) or pa.types.is_binary(arrow))
    # Numbers and bits may be texts here, but not in events, whose schemas have other types for them.
    others = _OTHERS if relation.modes.decimal != "string" else _OTHERS - {OIDS["numeric"]}
    return not any(c.name == name and known_type(c).oid in others for c in relation.columns)


def _with_placeholders(group: Group, found: dict[str, pa.Array]) -> dict[str, pa.Array]:
    # As in Debezium's JSON: a placeholder replaces a value that was not sent, if the column can hold a text.
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
