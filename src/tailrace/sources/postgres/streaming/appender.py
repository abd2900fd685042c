"""Appends PostgreSQL's frames to the log: adds facts of tables, and drops updates that change nothing."""

from __future__ import annotations

import threading

import numpy as np

from tailrace.changelog.writer import LogWriter
from tailrace.protocol import frames, metadata_frames
from tailrace.protocol.frames import Bytes, Summary
from tailrace.sources.appender import Appender
from tailrace.sources.postgres.schema.column_names import ColumnNames
from tailrace.sources.postgres.schema.relation_messages import SchemaWatch
from tailrace.sources.postgres.schema.table_facts import KnownFacts
from tailrace.sources.postgres.streaming.unchanged_updates import UnchangedUpdates


class PostgresAppender(Appender):
    """An `Appender` that inserts facts before Relation messages, and drops updates that change nothing."""

    def __init__(self, writer: LogWriter, stopping: threading.Event) -> None:
        super().__init__(writer, stopping)
        #: Facts in force at the log's end.
        self.facts_in_force = KnownFacts(writer.schema_in_force)
        #: Inserts facts before Relation messages; belongs to the open connection.
        self.schema_watch: SchemaWatch | None = None
        #: Stores the names of columns before a description of their table is appended.
        self.column_names: ColumnNames | None = None
        self.unchanged_updates: UnchangedUpdates | None = None

    @property
    def tables(self) -> list[int]:
        """The oids of the tables that the log has. Any thread."""
        # list() of a dictionary is atomic, so the receiver may change the dictionary meanwhile.
        return [int(key[1:]) for key in list(self.schema_in_force) if key.startswith("F")]

    def append(self, chunk: Bytes) -> Summary:
        """Append complete frames as `Appender.append` does, with the facts of their tables."""
        self.raise_failure()
        if (facts := self.settled_facts()) is not None:
            chunk = np.concatenate((facts, chunk))
        summary = frames.summarise(chunk, self._state)
        if summary.has_schema and self.schema_watch is not None:
            annotated = self.schema_watch.annotate(chunk, self._writer.scan_state())
            chunk, summary = self._in_place_of(chunk, annotated, summary)
        if summary.has_schema and self.column_names is not None:
            self.column_names.note(chunk, self.facts_in_force)
        if self.unchanged_updates is not None:
            left = self.unchanged_updates.apply(chunk, self.facts_in_force, summary.has_schema)
            chunk, summary = self._in_place_of(chunk, left, summary)
            if not len(chunk):
                return summary
        self._write(chunk, summary)
        if summary.has_schema:
            for key, frame in metadata_frames.schema_frames(chunk):
                self.facts_in_force.take(key, frame)
        return summary

    def settled_facts(self) -> Bytes | None:
        """Return pending facts that are known now; None if there are none."""
        return None if self.schema_watch is None else self.schema_watch.settle()

    def discard_open_unit(self) -> None:
        """Truncate the log to its last boundary: the source sends whole transactions again."""
        super().discard_open_unit()
        self.facts_in_force = KnownFacts(self._writer.schema_in_force)
        if self.schema_watch is not None:
            self.schema_watch.forget()

    def _in_place_of(self, scanned: Bytes, chunk: Bytes, summary: Summary) -> tuple[Bytes, Summary]:
        # Return the chunk that replaces `scanned`, and its summary; it is scanned if it is another object.
        if chunk is scanned:
            return scanned, summary
        self._state = self._writer.scan_state()
        return chunk, frames.summarise(chunk, self._state)
