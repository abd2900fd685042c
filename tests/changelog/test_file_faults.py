"""The log's small files: a crash or a full disk at each file operation, a loss of power, and other users."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tailrace.changelog import durable
from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.lock import take_lock
from tailrace.changelog.reader import LogReader
from tailrace.changelog.retention.policy import RetentionRules
from tailrace.changelog.retention.prune import apply
from tailrace.changelog.retention.readers import Readers
from tailrace.changelog.verify import verify
from tailrace.changelog.writer import LogOptions, LogWriter
from tailrace.errors import Kind, TailraceError
from tailrace.sinks.target import locked
from tailrace.sources.snapshot_requests import ask, request_files, take_requests, waiting
from tests.support.changelog.frames_of import SOURCE, Source, append, new_log
from tests.support.file_faults import deaths, full_disks, not_durable
from tests.support.torture import disk

TASK = "0"
_NOBODY = 65534


def _live(path: Path) -> None:
    """Do everything that an engine, its sinks and a command do in a log's directory."""
    log = new_log(path)
    readers = Readers(log)
    with LogWriter.open(log, TASK, options=LogOptions(segment_bytes=300)) as writer:
        source = Source(lsn=max(writer.tail.position, 0x1000))
        readers.begin("sink", TASK, writer.tail.offset)
        for number in range(3):
            append(writer, source.transaction(2))
            end = writer.sync().offset
            log.state_write(f"tasks/{TASK}/some.state", {"number": number})
            readers.commit("sink", TASK, end, kept={"log_offset": end})
        ask(log, tables=["public.t"])
        assert len(waiting(log)) == len(request_files(log))
        assert take_requests(log, lambda request: request.wants_rows)
        apply(log, TASK, RetentionRules(size_bytes=600))
        readers.begin("other", TASK, writer.tail.offset)
        readers.begin("sink", TASK, 0)
        readers.remove("other")


def _require_sound(path: Path) -> None:
    report = verify(path)
    assert report.sound, report.problems
    with LogReader.open(path, TASK) as reader:
        assert reader.blocks(reader.start, reader.end().offset)
    offsets = Readers.open(path).require("sink").offsets
    assert offsets == {TASK: 0}
    assert request_files(LogDirectory.open(path)) == []


@pytest.mark.slow
def test_after_a_crash_at_any_file_operation_the_next_process_goes_on(memory_path: Path) -> None:
    path = memory_path / "log"
    died = []
    for operation in deaths(path, lambda: _live(path)):
        died.append(operation)
        _live(path)
        _require_sound(path)
        # At most the file that was being written is left, under a name that is not read.
        left = [each.name for each in path.rglob(".*")]
        assert len(left) <= 1, operation
        assert all(name.endswith(".tmp") for name in left), operation
        shutil.rmtree(path)
    assert len(died) > 50


@pytest.mark.slow
def test_a_full_disk_at_any_file_operation_is_reported(memory_path: Path) -> None:
    path = memory_path / "log"
    for operation, raised in full_disks(path, lambda: _live(path)):
        if raised is not None:
            assert isinstance(raised, TailraceError), operation
            assert raised.kind in {Kind.LOG_FULL, Kind.LOG_WRITE_FAILED}, operation
        _live(path)
        _require_sound(path)
        shutil.rmtree(path)


@pytest.mark.skipif(not disk.can_mount(), reason="mounts a small disk, which needs root")
def test_on_a_full_disk_a_lock_is_taken_without_the_holders_name(tmp_path: Path) -> None:
    with disk.small_disk(tmp_path / "disk", 1) as small:
        for folder in ("a", "b"):
            (small / folder).mkdir()
            os.close(take_lock(small / folder))
            (small / folder / "lock").write_bytes(b"")
        ballast = disk.fill(small)
        held = take_lock(small / "a")
        with pytest.raises(TailraceError, match="another process is writing it"):
            take_lock(small / "a")
        os.close(held)
        os.close(locked(small / "b" / "lock", "lake", small))
        with pytest.raises(TailraceError) as refused:
            LogDirectory.create_or_open(small / "log", SOURCE)
        assert refused.value.kind is Kind.LOG_FULL
        ballast.unlink()


def test_an_unreadable_request_of_another_user_is_skipped(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = new_log(memory_path / "log")
    ask(log, tables=["public.t"])

    def refused(_: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(durable, "read_state", refused)
    assert waiting(log) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away, which needs root")
@pytest.mark.parametrize("before", ["nothing", "a folder of root"])
def test_a_request_written_by_root_belongs_to_the_logs_owner(memory_path: Path, before: str) -> None:
    log = new_log(memory_path / "log")
    if before == "a folder of root":
        ask(log, tables=["public.t"])
        assert take_requests(log, lambda _: True)
    os.chown(log.path / "identity.json", _NOBODY, _NOBODY)
    ask(log, tables=["public.t"])
    (file,) = request_files(log)
    for path in (file, *file.parents[:3]):
        assert (path.stat().st_uid, path.stat().st_gid) == (_NOBODY, _NOBODY), path


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away, which needs root")
def test_the_target_of_a_symbolic_link_does_not_change_its_owner(tmp_path: Path) -> None:
    secret, folder = tmp_path / "secret", tmp_path / "folder"
    secret.touch()
    folder.mkdir()
    os.chown(folder, _NOBODY, _NOBODY)
    (folder / "request").symlink_to(secret)
    assert durable.give_to_owner(folder / "request", folder)
    assert secret.stat().st_uid == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away, which needs root")
def test_a_reader_file_written_by_root_belongs_to_the_folders_owner(memory_path: Path) -> None:
    log = new_log(memory_path / "log")
    readers = Readers(log)
    readers.begin("sink", TASK, 0)
    folder = log.path / "readers"
    os.chown(folder, _NOBODY, _NOBODY)
    readers.commit("sink", TASK, 5)
    assert {path.stat().st_uid for path in folder.glob("*.json")} == {_NOBODY}


def test_a_request_may_be_taken_by_the_engine_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_log(tmp_path / "log")
    taken = []
    write = LogDirectory.state_write

    def written(directory: LogDirectory, name: str, content: dict[str, Any]) -> None:
        write(directory, name, content)
        assert take_requests(directory, lambda request: taken.append(request) is None)

    monkeypatch.setattr(LogDirectory, "state_write", written)
    asked = ask(LogDirectory.open(tmp_path / "log"), tables=["public.t"], where="", cancels=False)
    assert taken == [asked]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away, which needs root")
def test_a_request_that_the_engine_could_not_read_is_refused(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = new_log(memory_path / "log")
    ask(log, tables=["public.t"])
    (asked,) = request_files(log)
    for path in (log.path / "identity.json", asked, *asked.parents[:3]):
        os.chown(path, _NOBODY, _NOBODY)

    def refused(*_: object, **_options: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "chown", refused)
    with pytest.raises(TailraceError, match="belongs to another user than the log") as caught:
        ask(log, tables=["public.t"])
    assert caught.value.kind is Kind.LOG_WRITE_FAILED
    assert [path.name for path in asked.parent.iterdir()] == [asked.name]


def test_all_files_of_a_log_survive_a_loss_of_power(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = memory_path / "log"
    with not_durable(path, monkeypatch) as lost:
        _live(path)
    assert lost == set()
