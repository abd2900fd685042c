"""The outbox pattern: rows inserted into an outbox table become the events that they contain.

The columns of an inserted row have the topic, key, value and headers of its event. Deletes and truncates,
which empty an outbox, are dropped. Updates are logged and dropped, or stop the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import structlog

from tailrace.config.patterns import matches_any
from tailrace.config.transformations import options
from tailrace.config.transformations.steps import python_regex
from tailrace.decode.values.json_texts import are_json, quoted
from tailrace.expressions.language import ExpressionError
from tailrace.model import Relation
from tailrace.records.group import Flags, Group
from tailrace.transforms.fields import KEY, ROW, failure, with_relation
from tailrace.transforms.groups.values import TEXT, cast, members, struct_of
from tailrace.transforms.headers import with_headers
from tailrace.transforms.keys import require_held
from tailrace.transforms.routes import parted, replaced
from tailrace.transforms.selection import Operations

log = structlog.get_logger(__name__)

_INSERTS, _UPDATES = Operations("rc"), Operations("u")


@dataclass(frozen=True, slots=True)
class Outbox:
    """Makes events of the rows of outbox tables; all other records stay unchanged."""

    given: options.OutboxConfig

    def apply(self, group: Group) -> list[Group]:
        """Return the events, a group for each topic.

        :raises TailraceError: `TRANSFORM_FAILED` if the table lacks a column that the options name, a row
            has no value to route by, or a row was updated and `on_update` is `fatal`.
        """
        relation, given = group.relation, self.given
        if relation is None or not group.is_change:
            return [group]
        if not matches_any(given.tables, relation.schema, relation.table):
            return [group]
        self._check_updates(group)
        rows = np.flatnonzero(_INSERTS.matches(group))
        if not len(rows):
            return []
        events = self._events(group.take(rows))
        return [part for part in events if len(part)]

    def _check_updates(self, group: Group) -> None:
        count = int(np.count_nonzero(_UPDATES.matches(group)))
        if not count:
            return
        if self.given.on_update == "fatal":
            raise failure(
                group,
                f"read an outbox: {count} of its rows were updated, and each row is only one event",
                "only insert rows and delete them; on_update: warn skips updates",
            )
        tell = log.warning if self.given.on_update == "warn" else log.error
        tell("outbox_updates_skipped", table=group.topic, updates=count)

    def _events(self, group: Group) -> list[Group]:
        given, columns = self.given, members(group.column("after"))
        placed = [_placed(placement) for placement in given.additional]
        wanted = {
            "event_id": given.event_id,
            "event_key": given.event_key,
            "payload": given.payload,
            "route_by": given.route_by,
            **{f"additional, {name},": name for name, _, _ in placed},
        }
        for option, name in wanted.items():
            if name not in columns:
                raise failure(
                    group,
                    f"read an outbox: the table has no column {name!r}",
                    f"correct the option {option} or set tables to the outbox tables only",
                )
        require_held(group, "after", wanted.values())
        payload, empty = self._payload(group, columns[given.payload])
        inside = {alias: name for name, place, alias in placed if place == "envelope"}
        more = {alias: columns[name] for alias, name in inside.items()}
        value = struct_of({"payload": payload, **more}, empty, len(group)) if inside else payload
        plain = {
            "op": group.column("op"),
            "key": columns[given.event_key],
            "value": value,
            "source": group.column("source"),
            "headers": group.headers,
        }
        for name, place, _ in placed:
            if place == "partition":
                plain["partition"] = _partitions(group, columns[name], name)
        headers = {"id": columns[given.event_id]}
        headers |= {alias: columns[name] for name, place, alias in placed if place == "header"}
        made = with_headers(group.with_columns(pa.RecordBatch.from_pydict(plain)), headers)
        in_value = {"payload": given.payload, **inside} if inside else {"": given.payload}
        for part, names in ((ROW, in_value), (KEY, {"": given.event_key})):
            made = with_relation(made, part, partial(_with_columns, names))
        return self._routed(made, columns[given.route_by])

    def _payload(self, group: Group, payload: pa.Array) -> tuple[pa.Array, pa.Array | None]:
        """Return the payloads, and which records are tombstones because their payload is empty."""
        empty = None
        if self.given.tombstone_on_empty_payload:
            empty = pc.is_null(payload)
            if pa.types.is_string(payload.type) or pa.types.is_binary(payload.type):
                text = payload if pa.types.is_binary(payload.type) else pc.ascii_trim_whitespace(payload)
                empty = pc.fill_null(pc.equal(pc.binary_length(text), 0), True)
                payload = pc.if_else(empty, pa.scalar(None, payload.type), payload)
        if self.given.expand_json_payload:
            if not pa.types.is_string(payload.type):
                raise failure(
                    group,
                    f"expand an outbox's payloads: {self.given.payload!r} is {payload.type}, not text",
                    "use a column of text or JSON, or set expand_json_payload: false",
                )
            payload = expanded(payload)
        return payload, empty

    def _routed(self, group: Group, by: pa.Array) -> list[Group]:
        try:
            names = cast(by, TEXT)
        except ExpressionError:
            names = pa.nulls(len(group), pa.string())
        found = []
        regex = python_regex(self.given.route_topic_regex)
        for name, part in parted(group, names):
            topic = name and (replaced(name, regex, self.given.route_topic_replacement) or name)
            if not topic or not topic.strip():
                raise failure(
                    group,
                    f"route an outbox's events: {len(part)} rows have no value in {self.given.route_by!r}",
                    "set the column in each row (NOT NULL), or route by another one (route_by)",
                )
            found.append(part.with_topic(topic))
        return found


def _with_columns(names: Mapping[str, str], relation: Relation) -> Relation:
    """Return a table with these columns of it, by their new names; that of a single value is empty."""
    known = {column.name: column for column in relation.columns}
    columns = (replace(known[name], name=new) for new, name in names.items() if name in known)
    return replace(relation, columns=tuple(columns), primary_key=(), chosen_key=())


def _placed(placement: str) -> tuple[str, str, str]:
    """Return a column, where it is placed, and its name there."""
    name, place, *alias = placement.split(":")
    return name, place, alias[0] if alias else name


def _partitions(group: Group, values: pa.Array, name: str) -> pa.Array:
    try:
        return cast(values, "INTEGER")
    except ExpressionError:
        raise failure(
            group,
            f"place events in partitions: the values of the column {name!r} are not 32-bit numbers",
            "use another column: a partition is a number from 0",
        ) from None


def expanded(texts: pa.StringArray) -> pa.Array:
    """Return texts as JSON: valid JSON unchanged, any other text as a JSON string."""
    valid: Flags = are_json(texts)
    if not valid.all():
        texts = pc.if_else(pa.array(valid), texts, quoted(texts))
    return pa.ExtensionArray.from_storage(pa.json_(pa.string()), texts)
