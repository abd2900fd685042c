"""The shape of each table at a place in the log: the schema frames in force there.

Frames are kept as bytes and parsed when a change needs them: a log may contain hundreds of tables,
a block changes of two.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from tailrace.decode.postgres_types import FIRST_NOT_BUILT_IN, from_facts, from_message
from tailrace.errors import REPORT_LOG, Kind, TailraceError
from tailrace.model import OWN_FORMS, Column, Relation, ValueModes, ValueType
from tailrace.protocol.facts import Facts
from tailrace.protocol.frames import FACTS, KIND_AT, XLOG_PAYLOAD_AT, control_json
from tailrace.protocol.metadata_frames import schema_frames
from tailrace.protocol.pgoutput import parse_relation, parse_type

_FACTS = b"x" + FACTS


class Catalog:
    """The schema frames in force: the last one of each table. `apply` them in log order.

    :param modes: how values are represented; every relation carries them.
    :param settled: facts frames, by relation and version, that replace pending ones.
    """

    def __init__(
        self,
        frames: Iterable[bytes] = (),
        modes: ValueModes = OWN_FORMS,
        settled: Mapping[tuple[int, int], bytes] | None = None,
    ) -> None:
        self._modes = modes
        self._settled = settled or {}
        self._frames: dict[str, bytes] = {}
        for frame in frames:
            self.apply(frame)

    def apply(self, frame: bytes) -> None:
        """Put one complete schema frame (Relation, Type or facts) in force.

        :raises TailraceError: `PROTOCOL_VIOLATION` if it is not a schema frame.
        """
        if self._settled and (version := pending_version(frame)) is not None:
            frame = self._settled.get(version, frame)
        self._frames[_key(frame)] = frame

    def relation(self, oid: int) -> Relation:
        """Return the table's shape.

        :raises TailraceError: `SCHEMA_MISSING` if no Relation message is in force for `oid`.
        """
        frame = self._frames.get(f"R{oid}")
        if frame is None:
            raise TailraceError(
                Kind.SCHEMA_MISSING,
                "decoded a change: no Relation message describes its table",
                "the log is damaged, or another program wrote it: `tailrace log verify` says from which "
                "offset on. Restore its directory from a backup, or begin a new log with a new snapshot",
                {"relation": oid},
            )
        relation = _parsed(frame)
        oids = (column.type_oid for column in relation.columns if column.type_oid >= FIRST_NOT_BUILT_IN)
        messages = tuple(self._frames.get(f"Y{type_oid}") for type_oid in oids)
        return _relation(frame, self._frames.get(f"F{oid}"), messages, self._modes)

    @property
    def frames(self) -> list[bytes]:
        """The frames that are in force."""
        return list(self._frames.values())

    def named(self, tables: Collection[str]) -> frozenset[int]:
        """Return the oids of the relations that have one of these qualified names."""
        relations = map(_parsed, self._relation_frames())
        return frozenset(each.oid for each in relations if each.qualified_name in tables)

    def names(self) -> list[tuple[str, str]]:
        """Return schema and name of each table with a Relation message in force."""
        return [(table.schema, table.table) for table in map(_parsed, self._relation_frames())]

    def _relation_frames(self) -> list[bytes]:
        return [frame for key, frame in self._frames.items() if key.startswith("R")]


def pending_version(frame: bytes) -> tuple[int, int] | None:
    """Return relation and version of a facts frame with pending facts; None for any other frame."""
    if frame[KIND_AT : KIND_AT + 2] != _FACTS or b'"pending"' not in frame:
        return None
    facts = Facts.from_json(control_json(frame))
    return (facts.relation, facts.version) if facts.pending else None


@functools.lru_cache(maxsize=4096)
def _key(frame: bytes) -> str:
    try:
        found = schema_frames(np.frombuffer(frame, np.uint8))
    except (KeyError, TypeError, ValueError, OverflowError):
        found = []
    if len(found) != 1:
        raise TailraceError(Kind.PROTOCOL_VIOLATION, "read a schema frame: it is malformed", REPORT_LOG)
    return found[0][0]


@functools.lru_cache(maxsize=4096)
def _parsed(frame: bytes) -> Relation:
    return parse_relation(frame[XLOG_PAYLOAD_AT:])


@functools.lru_cache(maxsize=4096)
def _relation(
    frame: bytes, facts_frame: bytes | None, messages: tuple[bytes | None, ...], modes: ValueModes
) -> Relation:
    facts = None if facts_frame is None else Facts.from_json(control_json(facts_frame))
    # Facts about a type hold for all columns of the type, whatever version of the table the facts are of.
    types = {} if facts is None else {oid: of for column in facts.columns for oid, of in column.types.items()}
    relation = _parsed(frame)
    waiting = iter(messages)
    columns = tuple(
        column
        if column.type_oid < FIRST_NOT_BUILT_IN
        else dataclasses.replace(column, value_type=_value_type(column, types, next(waiting)))
        for column in relation.columns
    )
    relation = dataclasses.replace(relation, columns=columns, modes=modes)
    return relation if facts is None else _with_facts(relation, facts)


def _value_type(column: Column, types: dict[str, Any], message: bytes | None) -> ValueType:
    if str(column.type_oid) in types:
        return from_facts(column.type_oid, column.type_modifier, types)
    if message is None:
        return ValueType(column.type_oid, column.type_modifier)
    return from_message(*parse_type(message[XLOG_PAYLOAD_AT:]))


def _with_facts(relation: Relation, facts: Facts) -> Relation:
    names = [column.name for column in relation.columns]
    relation = dataclasses.replace(relation, pending=bool(facts.pending))
    if not set(facts.primary_key) <= set(names):
        return relation  # the facts are of another version: a key column was renamed or dropped since
    relation = dataclasses.replace(relation, primary_key=facts.primary_key)
    if [column.name for column in facts.columns] != names:
        return relation
    columns = tuple(
        dataclasses.replace(
            column,
            number=known.number,
            missing=known.missing,
            unknown=known.unknown,
            not_null=known.not_null,
            may_be_key=known.may_be_key,
        )
        for column, known in zip(relation.columns, facts.columns, strict=True)
    )
    return dataclasses.replace(relation, columns=columns, version=facts.version)
