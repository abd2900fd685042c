"""Lists every version of every table's schema in a log, for `tailrace log schemas`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.config import ColumnPolicy, matches
from tailrace.decode.column_policy import columns_of
from tailrace.decode.schemas import Catalog, pending_version
from tailrace.model import Column, Relation
from tailrace.protocol import frames, metadata_frames
from tailrace.protocol.facts import ColumnFacts, Facts, differences
from tailrace.protocol.frames import Bytes
from tailrace.protocol.renames import Renames
from tailrace.ranges.changes import settled_facts

_Column = TypeVar("_Column", Column, ColumnFacts)


@dataclass(frozen=True, slots=True)
class SchemaVersion:
    """A table's schema from a log offset on.

    `log_offset` is that of the Relation message; None: the version was in force at the log's start.
    `commit_lsn` is that of the transaction that showed it first, 0 if it is not known. `columns` are in table
    order, and `changes` lists the differences from the previous version. While `relation.pending`, columns
    are those of the Relation message alone.
    """

    relation: Relation
    columns: tuple[ColumnFacts, ...]
    log_offset: int | None
    commit_lsn: int
    changes: tuple[str, ...]


def versions(
    directory: LogDirectory, task: str, table: str | None = None, rules: ColumnPolicy | None = None
) -> list[SchemaVersion]:
    """Return the versions in log order; of tables that match the pattern `table`, if it is given.

    :param rules: which columns are shown, and how; None: all unchanged. Its masks also hide the value that a
        new column has in rows written before it was added.
    :raises TailraceError: `LOG_CORRUPT`, `PROTOCOL_VIOLATION`.
    """
    with LogReader.open(directory, task) as reader:
        listing = _Listing(reader, table, rules or ColumnPolicy(), reader.renames() if rules else Renames())
        start, end = reader.start, reader.end().offset
        for number, ref in enumerate(reader.blocks(start, end)):
            if number == 0:
                listing.begin(reader.schema_before(ref), start)
            if ref.header.has_schema:
                listing.take(reader.read(ref), ref.header.log_offset)
    return listing.found


class _Listing:
    """Reads schema frames in log order and lists each version of a table once."""

    def __init__(self, reader: LogReader, table: str | None, rules: ColumnPolicy, renames: Renames) -> None:
        self.found: list[SchemaVersion] = []
        self._reader = reader
        self._table = table
        self._rules = rules
        self._renames = renames
        self._catalog = Catalog()
        self._facts: dict[int, tuple[Facts, int]] = {}
        self._noted: dict[int, Relation] = {}
        self._shown: dict[tuple[str, str], Facts] = {}  # by schema and table, whose names may have dots

    def begin(self, in_force: list[bytes], start: int) -> None:
        """Read the frames that are in force at the log's start, `start`."""
        keys = [self._apply(frame, start) for frame in in_force]
        for key in keys:
            if key.startswith("R"):
                self._note(int(key[1:]), None)

    def take(self, block: Bytes, log_offset: int) -> None:
        """Read the frames of the block at `log_offset`."""
        described: tuple[int, int] | None = None  # relation and log offset of the message just before
        for at, view in frames.each_frame(block):
            key = self._apply(bytes(view), log_offset) if view[frames.KIND_AT] in b"wx" else ""
            if described is not None:
                # A snapshot's facts directly follow the message, the stream's precede it.
                self._note(*described)
                described = None
            if key.startswith("R"):
                described = int(key[1:]), log_offset + at
        if described is not None:
            self._note(*described)

    def _apply(self, frame: bytes, log_offset: int) -> str:
        """Read a frame at `log_offset` or later; return its key, "" if it is not a schema frame."""
        found = metadata_frames.schema_frames(np.frombuffer(frame, np.uint8))
        if not found:
            return ""
        if (version := pending_version(frame)) is not None:
            # The rows of this version are decoded with the facts that became known later.
            frame = settled_facts(self._reader, log_offset, [frame]).get(version, frame)
        self._catalog.apply(frame)
        if found[0][0].startswith("F"):
            facts = Facts.from_json(frames.control_json(frame))
            self._facts[facts.relation] = facts, int.from_bytes(frame[7:15], "big")
        return found[0][0]

    def _note(self, oid: int, log_offset: int | None) -> None:
        relation = self._catalog.relation(oid)
        if self._noted.get(oid) == relation:
            return
        self._noted[oid] = relation
        facts, lsn = self._facts.get(oid, (None, 0))
        if facts is None or facts.version != relation.version:
            columns = tuple(
                ColumnFacts(column.name, type_oid=column.type_oid, type_modifier=column.type_modifier)
                for column in relation.columns
            )
            facts = Facts(oid, relation.schema, relation.table, relation.primary_key, columns)
        relation, facts = _disclosed(relation, facts, self._rules, self._renames)
        name = relation.schema, relation.table
        before = self._shown.get(name) or next(
            (each for each in reversed(self._shown.values()) if each.relation == oid), None
        )
        changes = tuple(differences(before, facts)) if before is not None else ()
        self._shown.pop(name, None)
        self._shown[name] = facts
        if self._table is None or matches(self._table, relation.schema, relation.table):
            self.found.append(SchemaVersion(relation, facts.columns, log_offset, lsn, changes))


def _disclosed(
    relation: Relation, facts: Facts, rules: ColumnPolicy, renames: Renames
) -> tuple[Relation, Facts]:
    """Return a version without the columns that are left out and the values that masks hide."""
    schema, table = relation.schema, relation.table
    known = columns_of(relation, renames)
    left_out = rules.left_out(schema, table, known)
    primary_key = tuple(name for name in relation.primary_key if name not in left_out)
    chosen = rules.key_of(schema, table)

    def seen(columns: tuple[_Column, ...]) -> tuple[_Column, ...]:
        return tuple(
            column
            if rules.mask_of(schema, table, column.name, known) is None
            else replace(column, missing=None)
            for column in columns
            if column.name not in left_out
        )

    disclosed = replace(
        relation,
        columns=seen(relation.columns),
        primary_key=primary_key,
        chosen_key=tuple(column.name for column in relation.columns if column.name in chosen),
    )
    return disclosed, replace(facts, columns=seen(facts.columns), primary_key=primary_key)
