"""What tests of sinks share: a log written by hand, a replacement for Spark, readers of targets."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable
from pydantic import TypeAdapter

from tailrace.changelog.reader import LogReader
from tailrace.config.transformations.options import AnyTransformation
from tailrace.config.transformations.predicates import AnyPredicate
from tailrace.model import LogRange
from tailrace.protocol import frames
from tailrace.ranges.plan import InputSplit
from tailrace.sinks.contract import Sink, SinkCommit, SparkNeededError
from tailrace.sinks.delta.append import DeltaAppend
from tailrace.sinks.delta.mirror.sink import DeltaMirror
from tailrace.sinks.delta.sink import DeltaSink
from tailrace.sinks.files.jsonl import JSONL
from tailrace.sinks.files.parquet import parquet_format
from tailrace.sinks.files.sink import FileSink
from tailrace.sinks.write_job import SinkInput
from tailrace.transforms.tables import NO_STEPS, table_chain
from tests.support.spark.wire import HandmadeLog, row, xlog

TASK = "0"

#: The range after a crash, compared with the interrupted one.
WIDTHS = [
    pytest.param(-1, id="narrower", marks=pytest.mark.slow),
    pytest.param(0, id="same"),
    pytest.param(1, id="wider", marks=pytest.mark.slow),
]


class InProcess:
    """Runs the Python side of a Spark job in this process: `parallelize(…).mapPartitions(…).collect()`.

    Sinks use no more of Spark, except for the MERGE.
    """

    def __init__(self, work: Iterable[Any] = ()) -> None:
        self._parts = [[each] for each in work]
        self._function: Callable[[Any], Any] = iter

    @property
    def sparkContext(self) -> InProcess:  # noqa: N802 — Spark's name
        return self

    def parallelize(self, work: Iterable[Any], _slices: int) -> InProcess:
        return InProcess(work)

    def getJobTags(self) -> set[str]:  # noqa: N802 — Spark's name
        return set()

    def mapPartitions(self, function: Callable[[Any], Any]) -> InProcess:  # noqa: N802 — Spark's name
        self._function = function
        return self

    def collect(self) -> list[Any]:
        return [found for part in self._parts for found in self._function(iter(part))]


def make(
    kind: str,
    path: Path,
    tables: tuple[str, ...] | None = None,
    keyless: str = "refuse",
    steps: Sequence[dict[str, Any]] = (),
    predicates: dict[str, Any] | None = None,
    *,
    reads_once: bool = True,
) -> Sink:
    chain = NO_STEPS
    if steps:
        given = TypeAdapter(list[AnyTransformation]).validate_python(list(steps))
        chosen = TypeAdapter(dict[str, AnyPredicate]).validate_python(predicates or {})
        chain = table_chain(given, chosen, keeps_keys=kind == "mirror")
    taken = SinkInput(tables, chain=chain)
    if kind in ("parquet", "jsonl"):
        return FileSink("lake", path, JSONL if kind == "jsonl" else parquet_format(), taken)
    mode = DeltaAppend() if kind == "append" else DeltaMirror(keyless, reads_once=reads_once)
    return DeltaSink("lake", path, mode, taken)


def opened(kind: str, path: Path, log: HandmadeLog, **more: Any) -> Sink:
    sink = make(kind, path, **more)
    sink.open(log.directory.identity, "shop")
    return sink


def write_alone(sink: Sink, log: HandmadeLog, start: int, end: int) -> SinkCommit:
    """Write `[start, end)` as `write`, without Spark.

    :raises SparkNeededError: as `Sink.write`.
    """
    return sink.write(None, log.path, LogRange(TASK, start, end), _splits(log, start, end))


def write(sink: Sink, log: HandmadeLog, start: int, end: int, spark: Any = None) -> SinkCommit:
    """Write `[start, end)`, with a split for each transaction: a plan would put small ones together."""
    span, planned = LogRange(TASK, start, end), _splits(log, start, end)
    try:
        return sink.write(spark, log.path, span, planned)
    except SparkNeededError:
        return sink.write(InProcess(), log.path, span, planned)  # type: ignore[arg-type]


def _splits(log: HandmadeLog, start: int, end: int) -> list[InputSplit]:
    planned: list[InputSplit] = []
    with LogReader.open(log.path, TASK) as reader:
        at = start
        while at < end:
            upto = reader.boundary_within(at, 1, 1, end)
            planned.append(InputSplit(TASK, len(planned), at, upto, tuple(reader.blocks(at, upto))))
            at = upto
    return planned


# ---------------------------------------------------------------------- frames


def relation(
    oid: int, name: str, columns: dict[str, Any], key: tuple[str, ...] = ("id",), identity: str = "d"
) -> bytes:
    schema, _, table = name.partition(".")
    payload = b"R" + struct.pack("!I", oid) + schema.encode() + b"\0" + table.encode() + b"\0"
    payload += identity.encode() + struct.pack("!H", len(columns))
    for column, kind in columns.items():
        type_oid, modifier = kind if isinstance(kind, tuple) else (kind, -1)
        flagged = column in key or identity == "f"
        payload += bytes([flagged]) + column.encode() + b"\0" + struct.pack("!Ii", type_oid, modifier)
    return xlog(payload)


def rekey(oid: int, old: tuple[Any, ...], new: tuple[Any, ...]) -> bytes:
    """An update that changes the key."""
    return xlog(b"U" + struct.pack("!I", oid) + b"K" + row(old) + b"N" + row(new))


def update_whole(oid: int, old: tuple[Any, ...], new: tuple[Any, ...]) -> bytes:
    """An update under REPLICA IDENTITY FULL."""
    return xlog(b"U" + struct.pack("!I", oid) + b"O" + row(old) + b"N" + row(new))


def delete_whole(oid: int, *old: Any) -> bytes:
    """A delete under REPLICA IDENTITY FULL."""
    return xlog(b"D" + struct.pack("!I", oid) + b"O" + row(old))


def snapshot(lsn: int, *parts: tuple[int, bytes, list[str]]) -> bytes:
    """A snapshot unit of tables: (oid, relation frame, lines of COPY text)."""
    frames_, ordinal = [frames.control_frame(b"B", lsn, 0, {})], 0
    for oid, described, lines in parts:
        text = "".join(f"{line}\n" for line in lines).encode()
        frames_ += [described, frames.snapshot_frame(oid, ordinal, len(lines), text)]
        ordinal += len(lines)
    return b"".join([*frames_, frames.control_frame(b"E", lsn, 0, {})])


# ---------------------------------------------------------------------- readers of targets


def offsets(kind: str, folder: Path) -> list[int]:
    """The sorted log offsets of the changes in a table's folder, as a reader finds them."""
    if kind == "append":
        return sorted(DeltaTable(str(folder)).to_pyarrow_table()["_log_offset"].to_pylist())
    visible = [path for path in folder.iterdir() if not path.name.startswith((".", "_"))]
    if kind == "parquet":
        found = ds.dataset([str(path) for path in visible], format="parquet").to_table()
        return sorted(found["_log_offset"].to_pylist())
    lines = [line for path in visible for line in path.read_text("utf-8").split("\n")[:-1]]
    return sorted(json.loads(line)["position"]["log_offset"] for line in lines)


def mirror_rows(folder: Path) -> list[dict[str, Any]]:
    """A mirror's rows without the column `_position`, sorted."""
    rows = DeltaTable(str(folder)).to_pyarrow_table().drop_columns(["_position"]).to_pylist()
    return sorted(rows, key=str)
