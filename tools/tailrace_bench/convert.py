"""Wire bytes to events as they go out, on one core."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from tailrace import __version__
from tailrace.changelog.reader import LogReader
from tailrace.converters.avro.binary import encoded
from tailrace.converters.avro.program import program_of
from tailrace.converters.cloudevents import CloudEventsConverter
from tailrace.converters.contract import Converter
from tailrace.converters.debezium import JsonConverter
from tailrace.errors import Kind, TailraceError
from tailrace.records.group import Group
from tailrace.sources.postgres.decode.changes import TableChanges, decode_block
from tailrace.sources.postgres.decode.json.debezium import SourceInfo
from tailrace_bench.decode import captured
from tailrace_bench.support.report import Result, machine, median

ROWS = 300_000
TURNS = 5

_FACTS = SourceInfo("bench", "bench", __version__)


def measure(rows: int | None = None) -> Result:
    """Convert a captured log of `rows` rows by each converter five times, after one pass that is not
    counted. Times are the process's own, so that other work on the machine counts little.

    The reference is the JSON Lines sink's writer on the same blocks.
    """
    rows = rows or ROWS
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as directory:
        log = Path(directory) / "log"
        captured(log, rows)
        _use_one_core()
        blocks = _Blocks(log, rows)
        ways: dict[str, Callable[[], int]] = {
            "json_lines": blocks.lines,
            "json": blocks.converted_by(JsonConverter()),
            "json_schemas": blocks.converted_by(JsonConverter(schemas_enable=True)),
            "json_from_columns": blocks.converted_by(JsonConverter(), as_columns=True),
            "cloudevents": blocks.converted_by(CloudEventsConverter()),
            "avro": blocks.encoded,
        }
        seconds = {name: [_timed(way, rows) for _ in range(TURNS + 1)][1:] for name, way in ways.items()}
    middle = {name: median(times) for name, times in seconds.items()}
    return Result(
        name="convert",
        value=rows / middle["json"],
        unit="events/s",
        ratio=middle["json_lines"] / middle["json"],
        reference="the writer of the JSON Lines sink on the same blocks",
        limit="one core: finding the cells and writing them as JSON",
        setup=machine() | {"rows": rows, "columns": 10, "cores_used": 1, "turns": TURNS},
        details={f"{name}_us_per_event": round(time_s / rows * 1e6, 3) for name, time_s in middle.items()},
    )


def _use_one_core() -> None:
    pa.set_cpu_count(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


class _Blocks:
    """The log's blocks in memory."""

    def __init__(self, log: Path, rows: int) -> None:
        reader = LogReader.open(log, "0")
        end = reader.end().offset
        self._schema = reader.all_schema_frames(reader.start, end)
        self._raw = [(reader.read(block), block.header) for block in reader.blocks(reader.start, end)]
        self._rows = rows

    def _changes(self) -> list[TableChanges]:
        return [
            changes
            for frames, header in self._raw
            for changes in decode_block(frames, header.log_offset, header.open_at_start, self._schema)
        ]

    def lines(self) -> int:
        """Write all rows as the JSON Lines sink does; returns how many."""
        return sum(len(changes.json_lines("0", _FACTS)) for changes in self._changes())

    def converted_by(self, converter: Converter, *, as_columns: bool = False) -> Callable[[], int]:
        """Return what converts all rows, from the wire or decoded to columns first, and tells how many."""

        def convert() -> int:
            found = 0
            for changes in self._changes():
                group = Group.of_changes("bench", np.arange(changes.count), changes, _FACTS)
                if as_columns:
                    group = group.with_columns(group.columns)
                found += len(converter.convert(group))
            return found

        return convert

    def encoded(self) -> int:
        """Write keys and values of all rows in Avro, without the registry; returns how many."""
        found = 0
        converter = JsonConverter()
        for changes in self._changes():
            group = Group.of_changes("bench", np.arange(changes.count), changes, _FACTS)
            events, schemas = converter.payloads(group)
            found += len(encoded(events.values, program_of(schemas.value.document()), 1))
            if events.keys is not None and schemas.key is not None:
                encoded(events.keys, program_of(schemas.key.document()), 2)
        return found


def _timed(work: Callable[[], int], rows: int) -> float:
    began = time.process_time()
    found = work()
    if found != rows:
        raise TailraceError(Kind.INTERNAL, f"convert the log: {found} events of {rows} rows")
    return time.process_time() - began
