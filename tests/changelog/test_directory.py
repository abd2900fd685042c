"""Identity, state files and file modes."""

from __future__ import annotations

import os
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.changelog import durable
from tailrace.changelog.directory import LogDirectory, decode_name, encode_name
from tailrace.changelog.retention.policy import RetentionRules
from tailrace.changelog.retention.prune import apply
from tailrace.changelog.retention.readers import Readers
from tailrace.changelog.writer import LogOptions, LogWriter
from tailrace.errors import Kind, TailraceError
from tests.support.changelog.frames_of import SOURCE, Source, append, new_log


def test_a_log_is_created_once_and_found_again(tmp_path: Path) -> None:
    created = new_log(tmp_path / "deep" / "log")
    assert new_log(tmp_path / "deep" / "log") == created
    assert LogDirectory.open(created.path) == created
    assert created.identity.source == SOURCE


@pytest.mark.parametrize("field", ["type", "system_identifier", "database", "slot"])
def test_a_log_of_another_source_is_refused(tmp_path: Path, field: str) -> None:
    log = new_log(tmp_path)
    with pytest.raises(TailraceError) as caught:
        LogDirectory.create_or_open(log.path, replace(SOURCE, **{field: "other"}))
    assert caught.value.kind is Kind.LOG_FOREIGN


def test_a_directory_with_other_files_is_not_made_a_log(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(TailraceError) as caught:
        new_log(tmp_path)
    assert caught.value.kind is Kind.LOG_FOREIGN
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_reading_a_missing_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TailraceError) as caught:
        LogDirectory.open(tmp_path)
    assert caught.value.kind is Kind.LOG_MISSING
    assert caught.value.hint


def test_a_truncated_or_changed_identity_is_refused(tmp_path: Path) -> None:
    path = new_log(tmp_path).path / "identity.json"
    sound = path.read_bytes()
    broken = [sound[:length] for length in range(len(sound))]
    broken += [sound[:at] + bytes([sound[at] ^ 0x20]) + sound[at + 1 :] for at in range(len(sound))]
    for data in broken:
        path.write_bytes(data)
        with pytest.raises(TailraceError) as caught:
            new_log(tmp_path)
        assert caught.value.kind is Kind.LOG_CORRUPT


def test_processes_that_create_a_log_at_once_get_the_same_one(tmp_path: Path) -> None:
    found: list[str] = []
    barrier = threading.Barrier(8)

    def create() -> None:
        barrier.wait(10)
        found.append(new_log(tmp_path / "log").identity.log_id)

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(found) == 8
    assert len(set(found)) == 1
    assert os.listdir(tmp_path / "log") == ["identity.json"]


def test_the_previous_state_file_replaces_a_damaged_one(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    assert log.state_read("tasks/0/capture.state") is None
    log.state_write("tasks/0/capture.state", {"lsn": 1})
    log.state_write("tasks/0/capture.state", {"lsn": 2})
    path = log.path / "tasks/0/capture.state"
    sound = path.read_bytes()
    for at in range(len(sound)):
        for data in (sound[:at], sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :]):
            path.write_bytes(data)
            assert log.state_read("tasks/0/capture.state") == {"lsn": 1}
    log.state_write("tasks/0/capture.state", {"lsn": 3})
    path.write_bytes(b"")
    assert log.state_read("tasks/0/capture.state") == {"lsn": 1}, "a damaged file became `.previous`"
    durable.previous_of(path).write_bytes(b"")
    with pytest.raises(TailraceError) as caught:
        log.state_read("tasks/0/capture.state")
    assert caught.value.kind is Kind.LOG_CORRUPT


def test_a_crash_between_the_two_renames_of_a_state_file_loses_nothing(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    log.state_write("x.state", {"n": 1})
    path = log.path / "x.state"
    path.replace(durable.previous_of(path))
    assert log.state_read("x.state") == {"n": 1}
    log.state_write("x.state", {"n": 2})
    assert log.state_read("x.state") == {"n": 2}


@given(st.text(min_size=1, max_size=30).filter(lambda text: max(text) < "\ud800" or min(text) > "\udfff"))
def test_any_name_is_encoded_as_a_file_name_and_decoded(name: str) -> None:
    encoded = encode_name(name)
    assert decode_name(encoded) == name
    assert not encoded.startswith(".")
    assert set(encoded) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.%")


def test_only_the_owner_may_read_the_files_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        log = new_log(tmp_path / "a" / "log")
        source = Source()
        with LogWriter.open(log, "0", options=LogOptions(segment_bytes=1)) as writer:
            for _ in range(3):
                append(writer, source.transaction())
                writer.sync()
        log.state_write("tasks/0/capture.state", {})
        Readers(log).register("sink", {"0": 0})
        apply(log, "0", RetentionRules(size_bytes=1))
    finally:
        os.umask(before)
    paths = [tmp_path / "a", *(tmp_path / "a").rglob("*")]
    assert len(paths) > 8
    for path in paths:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
