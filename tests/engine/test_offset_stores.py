"""Stores of offsets: durable, used by one process at a time, and readable after any crash."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tailrace.changelog import durable
from tailrace.config.engine_options import OffsetStorage
from tailrace.engine.offsets import stores
from tailrace.engine.offsets.stores import FileOffsetStore, MemoryOffsetStore, store_for
from tailrace.errors import Kind, TailraceError
from tailrace.testing import LinesSource
from tests.support.engines import Seen, engine_of
from tests.support.wait import wait_until

A, B = {"server": "a"}, {"server": "b", "shard": "-80"}


def opened(path: Path, name: str = "shop") -> FileOffsetStore:
    store = FileOffsetStore(path, name)
    store.start()
    return store


def test_offsets_come_back_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "offsets.json"
    store = opened(path)
    assert store.read([A, B]) == {}
    offset = {"lsn": 2**63 - 1, "texts": ["ü", None, 1.5], "nested": {"deep": True}}
    store.write([(A, {"lsn": 1}), (B, offset)], 5)
    store.write([(A, {"lsn": 2})], 5)
    store.stop()
    store = opened(path)
    assert store.read([B, {"server": "c"}, A]) == {0: offset, 2: {"lsn": 2}}
    store.stop()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text())["content"]["engines"]["shop"]


def test_numeric_keys_are_read_as_texts_before_and_after_a_restart(tmp_path: Path) -> None:
    path, as_read = tmp_path / "offsets.json", {0: {"parts": {"9": 1, "10": [2, 3]}}}
    store = opened(path)
    store.write([(A, {"parts": {9: 1, 10: (2, 3)}})], 5)
    assert store.read([A]) == as_read
    store.stop()
    store = opened(path)
    assert store.read([A]) == as_read
    store.stop()


def test_engines_that_use_a_file_in_turn_keep_each_others_offsets(tmp_path: Path) -> None:
    path = tmp_path / "offsets.json"
    for name, lsn in (("one", 1), ("two", 2), ("one", 3)):
        store = opened(path, name)
        store.write([(A, {"lsn": lsn})], 5)
        store.stop()
    for name, lsn in (("one", 3), ("two", 2)):
        store = opened(path, name)
        assert store.read([A]) == {0: {"lsn": lsn}}
        store.stop()
    path.unlink()
    durable.previous_of(path).unlink()
    store.start()
    assert store.read([A]) == {}
    store.stop()


@pytest.mark.follows("offsets_locked")
def test_one_process_at_a_time_uses_a_file(tmp_path: Path) -> None:
    first = opened(tmp_path / "offsets.json")
    second = FileOffsetStore(tmp_path / "offsets.json", "other")
    with pytest.raises(TailraceError) as raised:
        second.start()
    second.stop()
    assert raised.value.kind is Kind.OFFSETS_LOCKED
    assert raised.value.hint == "stop the other engine, or give this one its own file"
    opened(tmp_path / "own.json").stop()
    first.stop()
    opened(tmp_path / "offsets.json").stop()


def test_a_write_that_hangs_keeps_the_file_locked_until_it_ends(tmp_path, monkeypatch) -> None:
    path, began, release = tmp_path / "offsets.json", threading.Event(), threading.Event()
    write = durable.write_state

    def hanging(*given: Any) -> None:
        began.set()
        assert release.wait(60)
        write(*given)

    store = opened(path)
    monkeypatch.setattr(durable, "write_state", hanging)
    writing = threading.Thread(target=store.write, args=([(A, {"lsn": 1})], 5))
    writing.start()
    assert began.wait(60)
    monkeypatch.setattr(stores, "_STOP_S", 0.01)
    store.stop()
    with pytest.raises(TailraceError) as raised:
        opened(path)
    assert raised.value.kind is Kind.OFFSETS_LOCKED
    release.set()
    writing.join(60)
    after = opened(path)
    assert after.read([A]) == {0: {"lsn": 1}}
    with pytest.raises(TailraceError) as raised:
        store.write([(A, {"lsn": 0})], 5)
    assert raised.value.kind is Kind.OFFSETS_UNWRITABLE
    after.stop()


def test_an_offset_that_cannot_be_written_leaves_the_old_ones(tmp_path: Path) -> None:
    path = tmp_path / "offsets.json"
    store = opened(path)
    store.write([(A, {"lsn": 1})], 5)
    with pytest.raises(TailraceError) as raised:
        store.write([(A, {"lsn": object()})], 5)
    assert raised.value.kind is Kind.OFFSETS_UNWRITABLE
    assert "return offsets as JSON objects" in raised.value.hint
    assert store.read([A]) == {0: {"lsn": 1}}
    store.write([(B, {"lsn": 2})], 5)
    store.stop()
    store = opened(path)
    assert store.read([A, B]) == {0: {"lsn": 1}, 1: {"lsn": 2}}
    store.stop()


@pytest.mark.follows("offsets_unreadable")
def test_after_damage_the_previous_file_is_read_and_without_one_the_start_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "offsets.json"
    store = opened(path)
    store.write([(A, {"lsn": 1})], 5)
    store.write([(A, {"lsn": 2})], 5)
    store.stop()
    path.write_bytes(path.read_bytes()[:-9])
    with capture_logs() as logs:
        store = opened(path)
    assert store.read([A]) == {0: {"lsn": 1}}
    assert [(entry["log_level"], entry["read"]) for entry in logs] == [("warning", "offsets.json.previous")]
    store.stop()
    for damaged in tmp_path.glob("offsets.json*"):
        if not damaged.name.endswith(".lock"):
            damaged.write_text("{}")
    error = refused(path)
    assert "matches its checksum" in error.message
    follow_removal(error)
    store = opened(path)
    assert store.read([A]) == {}
    store.stop()


def refused(path: Path) -> TailraceError:
    store = FileOffsetStore(path, "shop")
    with pytest.raises(TailraceError) as raised:
        store.start()
    store.stop()
    assert raised.value.kind is Kind.OFFSETS_UNREADABLE
    return raised.value


def follow_removal(error: TailraceError) -> None:
    """Do only what the hint says."""
    found = re.search(r"remove (\S+) and (\S+), and every source is read from its beginning", error.hint)
    assert found is not None
    for name in found.groups():
        Path(error.context["file"]).with_name(name).unlink()


@pytest.mark.follows("offsets_unreadable")
def test_a_file_of_a_later_version_is_refused_and_its_hint_helps(tmp_path: Path) -> None:
    path = tmp_path / "offsets.json"
    store = opened(path)
    for lsn in (1, 2):
        store.write([(A, {"lsn": lsn})], 5)
    store.stop()
    durable.write_state(path, {"form": 2, "engines": {}})
    error = refused(path)
    assert "run the version of Tailrace that wrote it" in error.hint
    follow_removal(error)
    store = opened(path)
    assert store.read([A]) == {}
    store.stop()


def test_reading_only_the_previous_file_is_logged(tmp_path: Path) -> None:
    path = tmp_path / "offsets.json"
    store = opened(path)
    for lsn in (1, 2):
        store.write([(A, {"lsn": lsn})], 5)
    store.stop()
    path.unlink()
    with capture_logs() as logs:
        store = opened(path)
    assert store.read([A]) == {0: {"lsn": 1}}
    assert [(entry["log_level"], entry["read"]) for entry in logs] == [("warning", "offsets.json.previous")]
    store.stop()


def test_the_hint_for_a_file_that_cannot_be_opened_does_not_ask_to_remove_it(tmp_path: Path) -> None:
    path = tmp_path / "offsets.json"
    path.mkdir()
    error = refused(path)
    assert "remove" not in error.hint
    path.rmdir()
    opened(path).stop()


@pytest.mark.follows("offsets_unwritable")
def test_the_engine_goes_on_once_the_folder_is_writable_again(tmp_path: Path) -> None:
    folder, away = tmp_path / "offsets", tmp_path / "away"

    def run(seen: Seen) -> None:
        store = FileOffsetStore(folder / "offsets.json", "shop")
        options = {"offset_commit": {"policy": "always", "timeout_ms": 500}}
        engine_of(LinesSource(50), seen.record, offsets=store, options=options).run()

    first = Seen(lambda number: number == 5 and folder.exists() and folder.rename(away))
    with pytest.raises(TailraceError) as raised:
        run(first)
    assert raised.value.kind is Kind.OFFSETS_UNWRITABLE
    assert raised.value.hint == "check the file's permissions, and the free space and health of its disk"
    away.rename(folder)
    second = Seen()
    run(second)
    (before,), (after,) = first.lines.values(), second.lines.values()
    assert after[-1] == 50
    assert sorted({*before, *after}) == list(range(1, 51))
    third = Seen()
    run(third)
    assert third.count == 0  # everything was committed


WRITER = """
import sys
from pathlib import Path
import structlog
from tailrace.engine.offsets.stores import FileOffsetStore
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
store = FileOffsetStore(Path(sys.argv[1]), "shop")
store.start()
lsn = store.read([{}]).get(0, {"lsn": 0})["lsn"]
while True:
    lsn += 1
    store.write([({}, {"lsn": lsn})], 5)
    sys.stdout.write(f"{lsn}\\n")
    sys.stdout.flush()
"""


@pytest.mark.slow
def test_after_a_kill_the_file_has_the_last_written_offsets(tmp_path: Path) -> None:
    path, told = tmp_path / "offsets.json", tmp_path / "told"
    last = 0
    for life in range(4):
        with told.open("w") as out:
            writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=out)
        wanted = last + 20 + 7 * life

        def has_written(enough: int = wanted) -> bool:
            lines = told.read_text().split("\n")[:-1]
            return bool(lines) and int(lines[-1]) >= enough

        wait_until(has_written, 60)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait(30)
        acknowledged = int(told.read_text().split("\n")[-2])
        store = opened(path)
        last = store.read([{}])[0]["lsn"]
        store.stop()
        assert acknowledged <= last <= acknowledged + 1


def test_a_memory_store_keeps_its_offsets_over_restarts() -> None:
    store = store_for(OffsetStorage(type="memory"), "shop")
    assert isinstance(store, MemoryOffsetStore)
    store.start()
    store.write([(A, {"lsn": 1})], 5)
    store.stop()
    store.start()
    assert store.read([B, A]) == {1: {"lsn": 1}}


def test_the_configuration_names_the_store(tmp_path: Path) -> None:
    assert isinstance(store_for(OffsetStorage(type="file", path=tmp_path / "o"), "shop"), FileOffsetStore)
