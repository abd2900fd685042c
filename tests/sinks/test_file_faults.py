"""Sinks that write folders: a crash or a full disk at each file operation, and a loss of power."""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from tailrace.errors import Kind, TailraceError
from tailrace.protocol import frames
from tailrace.protocol.facts import ColumnFacts, Facts
from tailrace.sinks.delta.mirror.sink import DeltaMirror
from tailrace.sinks.files.parquet import ParquetWriter
from tests.support.file_faults import deaths, full_disks, not_durable
from tests.support.sinks.rig import make, mirror_rows, offsets, rekey, relation, write
from tests.support.spark.wire import INT4, INT8, TEXT, UNCHANGED, HandmadeLog, delete, insert, update
from tests.support.torture import disk

KINDS = ("parquet", "jsonl", "append", "mirror")
COLUMNS = {"id": INT8, "note": TEXT}
#: Rows that the mirror has at the end, by table.
ACCOUNTS = [
    {"id": 1, "note": "one", "n": None, "more": None},
    {"id": 3, "note": "three", "n": 30, "more": 31},
    {"id": 9, "note": "two", "n": None, "more": None},
]
#: The state files of a mirror.
KEPT = {"identity", "position-0", "columns-0", "tables-0", "settings", "read-0"}
OTHERS = [{"id": 7, "note": "again"}]


class Story(NamedTuple):
    log: HandmadeLog
    first: int  # the sink begins with some of the tables...
    second: int  # ...and gets all of them from here
    end: int


def _facts(oid: int, table: str, names: dict[str, int], version: int, read_from: int = 0) -> bytes:
    columns = tuple(
        ColumnFacts(name, number, type_oid=kind, base_oid=kind)
        for number, (name, kind) in enumerate(names.items(), 1)
    )
    found = Facts(oid, "public", table, ("id",), columns, version=version, read_from=read_from)
    return frames.control_frame(frames.FACTS, 0, 0, found.as_json())


@pytest.fixture
def story(memory_path: Path) -> Iterator[Story]:
    wider, widest = COLUMNS | {"n": INT4}, COLUMNS | {"n": INT4, "more": INT4}
    with HandmadeLog(memory_path / "log") as log:
        first = log.commit(
            _facts(1, "accounts", COLUMNS, 1), relation(1, "public.accounts", COLUMNS),
            insert(1, 1, "one"), insert(1, 2, "two"),
            _facts(2, "others", COLUMNS, 1), relation(2, "public.others", COLUMNS), insert(2, 5, "unseen"),
        )  # fmt: skip
        log.commit(rekey(1, (2, None), (9, "two")))
        second = log.commit(
            _facts(1, "accounts", wider, 2), relation(1, "public.accounts", wider), insert(1, 3, "three", 3)
        )
        again = _facts(2, "others", COLUMNS, 1, read_from=second)
        log.commit(again, insert(2, 7, "again"), delete(2, 5, None))
        end = log.commit(
            _facts(1, "accounts", widest, 3), relation(1, "public.accounts", widest),
            insert(1, 4, "four", 4, 4), update(1, 3, UNCHANGED, 30, 31), delete(1, 4, None, None, None),
        )  # fmt: skip
        yield Story(log, first, second, end)


def _live(kind: str, lake: Path, story: Story) -> None:
    """Do everything that a sink does in its folder; the second range adds a column and a table."""
    log = story.log
    for tables, end in ((("public.accounts",), story.second), (None, story.end)):
        sink = make(kind, lake, tables)
        try:
            sink.open(log.directory.identity, "shop")
            if (position := sink.position("0")) is None or position < end:
                write(sink, log, position or 0, end)
        finally:
            sink.close()


def _require_whole(kind: str, lake: Path, whole: Path, operation: str) -> None:
    if kind == "mirror":
        assert mirror_rows(lake / "public.accounts") == ACCOUNTS, operation
        assert mirror_rows(lake / "public.others") == OTHERS, operation
        return
    for table in ("public.accounts", "public.others"):
        assert offsets(kind, lake / table) == offsets(kind, whole / table), operation


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "in_turn"),
    [*((kind, False) for kind in KINDS), ("mirror", True)],
    ids=[*KINDS, "mirror, in turn"],
)
def test_after_a_crash_at_any_file_operation_the_next_sink_completes_the_range(
    kind: str, in_turn: bool, memory_path: Path, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_turn:  # the operations of tables that are committed at once come in another order each time
        monkeypatch.setattr(DeltaMirror, "commits_at_once", 1)
    lake, whole = memory_path / "lake", memory_path / "whole"
    _live(kind, whole, story)
    _require_whole(kind, whole, whole, "")
    died = set()
    for operation in deaths(lake, lambda: _live(kind, lake, story)):
        died |= {each for each in KEPT if each in operation}
        _live(kind, lake, story)
        _require_whole(kind, lake, whole, operation)
        left = [path.name for path in (lake / "_tailrace").rglob("*.tmp")]
        assert len(left) <= 1, operation
        shutil.rmtree(lake)
    assert not in_turn or died == KEPT


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_at_any_file_operation_fails_the_write_and_the_next_sink_completes_it(
    kind: str, memory_path: Path, story: Story
) -> None:
    lake, whole = memory_path / "lake", memory_path / "whole"
    _live(kind, whole, story)
    for operation, raised in full_disks(lake, lambda: _live(kind, lake, story)):
        assert raised is None or (
            isinstance(raised, TailraceError) and raised.kind is Kind.SINK_WRITE_FAILED
        ), operation
        _live(kind, lake, story)
        _require_whole(kind, lake, whole, operation)
        shutil.rmtree(lake)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_sink_has_written_survives_a_loss_of_power(
    kind: str, memory_path: Path, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = memory_path / "lake"
    with not_durable(lake, monkeypatch) as lost:
        _live(kind, lake, story)
    assert {path for path in lost if "/staging" not in path} == set()


@pytest.mark.skipif(not disk.can_mount(), reason="mounts a small disk, which needs root")
def test_nothing_is_printed_of_a_parquet_file_that_a_full_disk_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    with disk.small_disk(tmp_path / "disk", 1) as small:
        writer = ParquetWriter(str(small / "rows.parquet"), "none")
        with pytest.raises(OSError, match="No space left on device"):
            writer.write_table(pa.table({"id": range(2_000_000)}))
        del writer
        gc.collect()
    assert raised == []


@pytest.mark.parametrize("kind", ["append", "mirror"])
def test_a_disk_that_is_full_for_delta_rs_is_reported_with_what_to_do(
    kind: str, memory_path: Path, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise DeltaError("Unable to copy data to file: No space left on device (os error 28)")

    lake, log = memory_path / "lake", story.log
    sink = make(kind, lake, ("public.accounts",))
    sink.open(log.directory.identity, "shop")
    write(sink, log, 0, story.second)
    for method in ("merge", "create_write_transaction"):
        monkeypatch.setattr(DeltaTable, method, refuse)
    with pytest.raises(TailraceError) as caught:
        write(sink, log, story.second, story.end)
    assert caught.value.kind is Kind.SINK_WRITE_FAILED
    assert caught.value.hint == "make room on the sink's file system; the sink continues by itself"
    monkeypatch.undo()
    write(sink, log, story.second, story.end)
    sink.close()
    table = lake / "public.accounts"
    if kind == "mirror":
        assert mirror_rows(table) == ACCOUNTS
    else:
        assert len(set(offsets(kind, table))) == len(offsets(kind, table)) == 7
