"""Feeds sinks a log range by range, with failures on the way, and compares their contents.

The Python side of Spark jobs runs in this process, and merges that need Spark are done by `merging`, if the
test says so. After each range the mirrors are compared with the log's history folded up to there, after the
last one the histories with all changes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tailrace import failpoints
from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.model import LogRange
from tailrace.ranges import plan
from tailrace.sinks.contract import Sink
from tests.support.differential import lake
from tests.support.differential.fold import Fold
from tests.support.differential.history import Change, read_log, snapshot_end
from tests.support.sinks.ddl_story import make
from tests.support.sinks.rig import InProcess

TASK = "0"
HISTORIES = ("parquet", "jsonl", "append")
KINDS = (*HISTORIES, "mirror")
FAILS_AT = (
    "sink.before_write", "sink.after_write", "sink.before_commit", "sink.after_commit", "sink.after_publish",
    "sink.before_position",
)  # fmt: skip


class Feeding:
    """All sinks of one log.

    :param most: maximum number of changes in a range, about.
    """

    def __init__(
        self, log: Path, path: Path, rng: random.Random, most: int, kinds: Sequence[str] = KINDS
    ) -> None:
        self._log = LogDirectory.open(log)
        self._path = path
        self._rng = rng
        self._spark: Any = InProcess()
        self._most = most
        self._kinds = kinds
        self._follows = rng.random() < 0.3
        self._sinks: dict[str, Sink] = {}
        self._history = read_log(log)
        self._fold = Fold(snapshot_end(log))
        self._last: dict[int, Change] = {}  # the last change of each relation so far
        self._holders: dict[str, int] = {}  # the relation that had a name last

    def fill(self) -> list[str]:
        """Write the whole log; return the problems after the first range that has any."""
        with LogReader.open(self._log, TASK) as reader:
            at, end = reader.start, reader.end().offset
            while at < end:
                upto = reader.boundary_within(at, self._rng.randint(1, self._most), 1 << 40, end)
                for kind in self._kinds:
                    self._write(kind, reader, LogRange(TASK, at, upto))
                if problems := self._mirrors(at, upto):
                    return [f"in the range {at} to {upto}: {problem}" for problem in problems]
                at = upto
        for sink in self._sinks.values():
            sink.close()
        return [
            problem
            for kind in self._kinds
            if kind in HISTORIES
            for problem in lake.history_problems(kind, self._path / kind, self._history)
        ]

    def _write(self, kind: str, reader: LogReader, span: LogRange) -> None:
        if kind in self._sinks and self._rng.random() < 0.2:
            self._sinks.pop(kind).close()
        if self._rng.random() < 0.15:
            self._fail(kind, reader, span)
        for _ in range(self._rng.choice((1, 1, 1, 1, 2))):
            sink = self._opened(kind)
            sink.write(self._spark, self._log.path, span, self._splits(reader, span))
            assert sink.position(TASK) == span.end

    def _fail(self, kind: str, reader: LogReader, span: LogRange) -> None:
        """Write the range, or a part of it, until a failpoint stops it; half of the time the sink is
        opened again afterwards, as by another process.
        """
        end = reader.boundary_within(span.start, self._rng.randint(1, self._most), 1 << 40, span.end)
        part = LogRange(TASK, span.start, end)
        failpoints.arm(f"{self._rng.choice(FAILS_AT)}=error@{self._rng.randint(1, 3)}")
        try:
            self._opened(kind).write(self._spark, self._log.path, part, self._splits(reader, part))
        except failpoints.FailpointError:
            if self._rng.random() < 0.5:
                self._sinks.pop(kind).close()
        finally:
            failpoints.arm("")

    def _opened(self, kind: str) -> Sink:
        if kind not in self._sinks:
            follows = kind == "append" or self._follows
            self._sinks[kind] = make(
                kind, self._path / kind, keyless="full_row", on_type_change="follow" if follows else "stop"
            )
            self._sinks[kind].open(self._log.identity, "t")
        return self._sinks[kind]

    def _splits(self, reader: LogReader, span: LogRange) -> list[plan.InputSplit]:
        """Cut into splits as the planner does, or into more."""
        cut = self._rng.choice((1, 1, 2, 4))
        found: list[plan.InputSplit] = []
        at = span.start
        while at < span.end:
            most = max(1, (span.end - span.start) // cut)
            upto = reader.boundary_within(at, 1 << 40, most, span.end)
            found.append(plan.InputSplit(TASK, len(found), at, upto, tuple(reader.blocks(at, upto))))
            at = upto
        return found

    def _mirrors(self, start: int, end: int) -> list[str]:
        """Return the differences between the history and the mirrors of tables that changed in the range."""
        changes = [change for change in self._history if start <= change.log_offset < end]
        self._fold.take(changes)
        of_tables = {change.table: change for change in changes if change.table}
        for change in changes:
            if change.table:
                self._holders[change.name] = change.table
        self._last |= of_tables
        problems = list(self._fold.problems)
        for oid, change in of_tables.items():
            if "mirror" in self._kinds and oid in self._fold.tables and self._holders[change.name] == oid:
                rows = self._fold.tables[oid].held()
                problems += lake.mirror_problems(self._path / "mirror", change.name, rows, change.columns)
        return problems
