"""Which shape each table has at a place in the log: the schema frames in force there.

Frames are kept as bytes and parsed when a change needs them: a log may know hundreds of tables
of which a block touches two.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import numpy as np

from tailrace.errors import Kind, TailraceError
from tailrace.model import Relation
from tailrace.protocol.facts import Facts
from tailrace.protocol.frames import XLOG_PAYLOAD_AT, control_json, schema_frames
from tailrace.protocol.pgoutput import parse_relation


class Catalog:
    """Schema frames in force, the last of each table. `apply` them in log order."""

    def __init__(self, frames: Iterable[bytes] = ()) -> None:
        self._frames: dict[str, bytes] = {}
        for frame in frames:
            self.apply(frame)

    def apply(self, frame: bytes) -> None:
        """Put one whole schema frame (Relation, Type or facts) in force.

        :raises TailraceError: `PROTOCOL_VIOLATION` if it is none.
        """
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
                "the log is damaged or was written by another program: run `tailrace log verify`",
                {"relation": oid},
            )
        return _relation(frame, self._frames.get(f"F{oid}"))


@functools.lru_cache(maxsize=4096)
def _key(frame: bytes) -> str:
    try:
        found = schema_frames(np.frombuffer(frame, np.uint8))
    except (KeyError, TypeError, ValueError, OverflowError):
        found = []
    if len(found) != 1:
        raise TailraceError(Kind.PROTOCOL_VIOLATION, "read a schema frame: it describes nothing")
    return found[0][0]


@functools.lru_cache(maxsize=4096)
def _relation(frame: bytes, facts: bytes | None) -> Relation:
    relation = parse_relation(frame[XLOG_PAYLOAD_AT:])
    return relation if facts is None else _with_facts(relation, Facts.from_json(control_json(facts)))


def _with_facts(relation: Relation, facts: Facts) -> Relation:
    names = [column.name for column in relation.columns]
    if not set(facts.primary_key) <= set(names):
        return relation  # they are of another version: a column of the key was renamed or dropped since
    relation = dataclasses.replace(relation, primary_key=facts.primary_key)
    if [column.name for column in facts.columns] != names:
        return relation
    columns = tuple(
        dataclasses.replace(column, number=known.number, missing=known.missing, unknown=known.unknown)
        for column, known in zip(relation.columns, facts.columns, strict=True)
    )
    return dataclasses.replace(
        relation,
        columns=columns,
        version=facts.version,
        replaced=facts.replaced,
        replaced_name=facts.replaced_name,
    )
