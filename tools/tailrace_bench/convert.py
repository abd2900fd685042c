"""Wire bytes to converted events, on one core."""

from __future__ import annotations

import io
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa

from tailrace import __version__
from tailrace.changelog.reader import LogReader
from tailrace.converters.avro.encoder import HEADER_BYTES, encoded
from tailrace.converters.avro.schema import ADJUSTMENTS, avro_schema
from tailrace.converters.cloudevents import CloudEventsConverter
from tailrace.converters.contract import Converter
from tailrace.converters.debezium import JsonConverter
from tailrace.decode.changes import TableChanges, decode_block
from tailrace.decode.json.debezium import SourceInfo
from tailrace.errors import Kind, TailraceError
from tailrace.records.group import Group
from tailrace_bench.decode import captured
from tailrace_bench.support.report import Result, machine, median

ROWS = 300_000
TURNS = 5
#: Number of rows whose values fastavro writes; its time per row is constant.
FASTAVRO_ROWS = 10_000

_FACTS = SourceInfo("bench", "bench", __version__)


def measure(rows: int | None = None) -> Result:
    """Convert a captured log of `rows` rows with each converter five times in turn, after one pass that is
    not counted. Times are CPU times of this process, so that other load has little effect.

    The reference is the JSON Lines sink's writer on the same blocks. `fastavro_values` is fastavro's time for
    writing only the values, from existing Python objects; `avro` is the whole conversion.
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
            "avro_from_columns": lambda: blocks.encoded(as_columns=True),
        }
        values = _AvroValues(*blocks.avro_values(min(rows, FASTAVRO_ROWS)))
        seconds: dict[str, list[float]] = {name: [] for name in [*ways, "fastavro_values"]}
        for _ in range(TURNS + 1):
            for name, way in ways.items():
                seconds[name].append(_timed(way, rows))
            seconds["fastavro_values"].append(_timed(values.write, len(values)) * rows / len(values))
    middle = {name: median(times[1:]) for name, times in seconds.items()}
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
        """Write all rows as the JSON Lines sink does; return their number."""
        return sum(len(changes.json_lines("0", _FACTS)) for changes in self._changes())

    def converted_by(self, converter: Converter, *, as_columns: bool = False) -> Callable[[], int]:
        """Return a function that converts all rows, from wire bytes or columns, and returns their number."""

        def convert() -> int:
            found = 0
            for changes in self._changes():
                group = Group.of_changes("bench", np.arange(changes.count), changes, _FACTS)
                if as_columns:
                    group = group.with_columns(group.columns)
                found += len(converter.convert(group))
            return found

        return convert

    def encoded(self, *, as_columns: bool = False) -> int:
        """Write keys and values of all rows in Avro, without the registry; return the number of rows."""
        found = 0
        converter = JsonConverter()
        for changes in self._changes():
            group = Group.of_changes("bench", np.arange(changes.count), changes, _FACTS)
            if as_columns:
                group = group.with_columns(group.columns)
            events, schemas = converter.columns(group, with_keys=True)
            found += len(encoded(events.values, schemas.value.document(), 1))
            if events.keys is not None and schemas.key is not None:
                encoded(events.keys, schemas.key.document(), 2)
        return found

    def avro_values(self, count: int) -> tuple[list[bytes], Any]:
        """Return the first values in Avro, each without its header, and their schema."""
        found: list[bytes] = []
        converter = JsonConverter()
        for changes in self._changes():
            group = Group.of_changes("bench", np.arange(changes.count), changes, _FACTS)
            events, schemas = converter.columns(group, with_keys=True)
            document = schemas.value.document()
            written = encoded(events.values, document, 1)[: count - len(found)]
            found += [value[HEADER_BYTES:] for value in written.to_pylist()]
            if len(found) == count:
                break
        return found, avro_schema(document, ADJUSTMENTS["avro"], logical_types=False)


class _AvroValues:
    """Values as Python objects for fastavro.

    :raises TailraceError: `INTERNAL` if fastavro's bytes differ from Tailrace's.
    """

    def __init__(self, written: list[bytes], schema: Any) -> None:
        self._schema = fastavro.parse_schema(schema)
        self._objects = [fastavro.schemaless_reader(io.BytesIO(one), self._schema, None) for one in written]
        if [self._written(one) for one in self._objects] != written:
            raise TailraceError(Kind.INTERNAL, "compare Avro: fastavro writes other bytes")

    def __len__(self) -> int:
        return len(self._objects)

    def write(self) -> int:
        """Write all values; return their number."""
        return sum(1 for one in self._objects if self._written(one))

    def _written(self, value: Any) -> bytes:
        out = io.BytesIO()
        fastavro.schemaless_writer(out, self._schema, value)
        return out.getvalue()


def _timed(work: Callable[[], int], rows: int) -> float:
    began = time.process_time()
    found = work()
    if found != rows:
        raise TailraceError(Kind.INTERNAL, f"convert the log: {found} events of {rows} rows")
    return time.process_time() - began
