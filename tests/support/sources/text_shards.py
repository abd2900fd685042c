"""A type of source as a user may write it: shards are files of transactions, one in each line.

    <folder>/tables.json       the tables, and the rows before the first transaction
    <folder>/<shard>.jsonl     {"time_us": …, "changes": [["insert", "orders", ["1", "a"]], …]}
    <folder>/<shard>.sent      written by the capture: how many lines are no longer needed

A line without its newline is not committed yet. The position is the number of transactions in the log.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from pydantic import Field

from tailrace import failpoints
from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.writer import LogListener, LogWriter, Tail
from tailrace.config import PipelineConfig
from tailrace.config.fields import LocalPath
from tailrace.config.sections import LogConfig
from tailrace.config.source.section import SourceSection
from tailrace.errors import Kind, TailraceError
from tailrace.fair_semaphore import FairSemaphore
from tailrace.model import Relation, SourceFingerprint
from tailrace.protocol import frames, metadata_frames
from tailrace.sources.findings import Finding, error
from tailrace.sources.progress import CaptureProgress, SourceLook
from tailrace.sources.row_frames import ColumnShape, RowFrames, TableShape

POLL_S = 0.02


class TextShardsSection(SourceSection):
    """The settings of the source."""

    type: Literal["text_shards"] = "text_shards"
    folder: LocalPath = Field(description="Where the shards are.")
    shards: tuple[str, ...] = Field(min_length=1, description="Names of the shards.")

    @property
    def address(self) -> str:
        return str(self.folder)


class TextShards:
    """The type of source: see the module."""

    settings: ClassVar[type[SourceSection]] = TextShardsSection

    def capture(
        self,
        section: TextShardsSection,
        log: Path,
        options: LogConfig,
        *,
        name: str,
        semaphore: FairSemaphore | None = None,
        listener: LogListener | None = None,
    ) -> TextShardsCapture:
        return TextShardsCapture(section, log, listener)

    def end(self, section: TextShardsSection, stop: threading.Event) -> int:
        # The position after the last transaction: they are numbered from 1.
        return 1 + sum(len(_lines(section, shard)) for shard in section.shards)

    def look(
        self, pipeline: PipelineConfig, directory: LogDirectory, timeout_s: float, stop: threading.Event
    ) -> SourceLook:
        return SourceLook(self.end(cast(TextShardsSection, pipeline.source), stop))

    def snapshots(self, log: Path) -> None:
        return None

    def check(self, pipeline: PipelineConfig, directory: LogDirectory | None) -> TextShardsCheck:
        return TextShardsCheck(cast(TextShardsSection, pipeline.source))

    def findings_together(self, checks: Sequence[TextShardsCheck]) -> Iterator[Finding]:
        return iter(())

    def with_recovery(self, error: TailraceError, pipeline: PipelineConfig) -> TailraceError:
        return error

    def leftover_repair(self, source: SourceFingerprint) -> str:
        return ""


class TextShardsCheck:
    """Preflight: the folder exists, and everything in it can be read."""

    def __init__(self, section: TextShardsSection) -> None:
        self._section = section

    def connect(self) -> Iterator[Finding]:
        if not (self._section.folder / "tables.json").exists():
            yield error(Kind.SOURCE_UNREACHABLE, f"{self._section.folder} has no tables.json", "make it")

    def findings(self) -> Iterator[Finding]:
        for shard in self._section.shards:
            if not (self._section.folder / f"{shard}.jsonl").exists():
                yield error(Kind.SOURCE_MISCONFIGURED, f"the shard {shard!r} is not there", "correct shards")

    def tables(self) -> Sequence[tuple[str, str]]:
        return [("public", table) for table in _tables(self._section)]

    def relations(self, wants: Callable[[str, str], bool]) -> Sequence[Relation]:
        return []

    def close(self) -> None:
        pass


class TextShardsCapture:
    """Brings the transactions of all shards into one log, those of each shard in order."""

    def __init__(self, section: TextShardsSection, log: Path, listener: LogListener | None) -> None:
        self._section = section
        self._path = log
        self._listener = listener
        self._stopping = threading.Event()
        self._phase = "connecting"
        self._durable = Tail(0, 0, 0)
        self._rows = 0
        self._read: dict[str, int] = {}
        self._tables = _tables(section)
        #: A bug that the test of the contract must find: a restart begins at each shard's first line.
        self.forgets = False

    def run(self) -> None:
        fingerprint = SourceFingerprint("text_shards", str(self._section.folder), "text", "shards")
        writer = LogWriter.open(
            LogDirectory.create_or_open(self._path, fingerprint), "0", listener=self._listener
        )
        try:
            states = {} if self.forgets else metadata_frames.shard_states(writer.schema_in_force)
            self._read = {shard: state["lines"] for shard, state in states.items()}
            if writer.tail.offset == 0:
                self._phase = "snapshot"
                self._append(writer, self._snapshot())
            self._durable, self._phase = writer.durable, "streaming"
            while not self._stopping.is_set():
                taken = [self._take(writer, shard) for shard in self._section.shards]
                if not any(taken):
                    self._stopping.wait(POLL_S)
        finally:
            self._phase = "stopped"
            writer.close()

    def stop(self) -> None:
        self._stopping.set()

    def caught_up(self, position: int) -> bool:
        return self._durable.position >= position

    def progress(self) -> CaptureProgress:
        return CaptureProgress(
            phase=self._phase,  # type: ignore[arg-type]
            rows=self._rows,
            bytes=self._durable.offset,
            appended=self._durable,
            durable=self._durable,
            source_end=TextShards().end(self._section, self._stopping),
            acknowledged=self._durable.position,
            snapshot={},
            reconnects=0,
            error=None,
        )

    def _snapshot(self) -> RowFrames:
        found = RowFrames()
        found.begin_snapshot(1, 0)
        for shape, rows in self._tables.values():
            found.describe(shape)
            found.rows(shape, rows)
        found.end_snapshot()
        return found

    def _take(self, writer: LogWriter, shard: str) -> bool:
        """Bring one transaction of a shard into the log; return whether there was one."""
        lines, number = _lines(self._section, shard), self._read.get(shard, 0)
        if number >= len(lines):
            return False
        transaction = json.loads(lines[number])
        found = RowFrames(writer.schema_in_force)
        found.begin(self._durable.position, transaction["time_us"], number)
        for change, table, *rows in transaction["changes"]:
            if change == "table":
                self._tables[table] = (_shape(rows[0]), [])
                found.describe(self._tables[table][0])
            else:
                getattr(found, change)(self._tables[table][0], *rows)
        self._read[shard] = number + 1
        found.shard(shard, {"lines": number + 1})
        found.commit()
        self._append(writer, found)
        sent = self._section.folder / f"{shard}.sent"
        sent.with_suffix(".new").write_text(str(number + 1))
        sent.with_suffix(".new").replace(sent)
        return True

    def _append(self, writer: LogWriter, found: RowFrames) -> None:
        chunk = found.take()
        summary = frames.summarise(chunk, writer.scan_state())
        failpoints.hit("capture.before_append")
        writer.append(chunk, summary)
        failpoints.hit("capture.after_append")
        self._durable = writer.sync()
        self._rows += summary.rows


def _lines(section: TextShardsSection, shard: str) -> list[str]:
    return (section.folder / f"{shard}.jsonl").read_text().split("\n")[:-1]


def _tables(section: TextShardsSection) -> dict[str, tuple[TableShape, list[Any]]]:
    content = json.loads((section.folder / "tables.json").read_text())
    tables = {name: (_shape(table), table["rows"]) for name, table in content.items()}
    # A description that came with a transaction stays in force, also after a restart.
    for shard in section.shards:
        sent = section.folder / f"{shard}.sent"
        for line in _lines(section, shard)[: int(sent.read_text()) if sent.exists() else 0]:
            for change, table, *rows in json.loads(line)["changes"]:
                if change == "table":
                    tables[table] = (_shape(rows[0]), [])
    return tables


def _shape(table: dict[str, Any]) -> TableShape:
    columns = tuple(
        ColumnShape(name, of_type, number) for number, (name, of_type) in enumerate(table["columns"], 1)
    )
    return TableShape(
        table["relation"], "public", table["name"], columns, tuple(table["key"]), table.get("version", 1)
    )
