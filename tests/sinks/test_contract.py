"""The promises of `contract.Sink`, checked for each kind of sink that needs no MERGE."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tailrace import failpoints
from tailrace.errors import Kind, TailraceError
from tailrace.sinks import target, write_job
from tailrace.sinks.contract import require_within_log
from tailrace.sinks.delta.folder import DeltaFolder
from tailrace.sinks.files.sink import recorded_files_position
from tests.support.sinks.rig import WIDTHS, make, offsets, opened, rekey, relation, snapshot, write
from tests.support.spark.wire import INT8, TEXT, UNCHANGED, HandmadeLog, delete, insert, truncate, update

KINDS = ["parquet", "jsonl", "append"]
ORDERS = relation(1, "public.orders", {"id": INT8, "note": TEXT})
ITEMS = relation(2, "public.items", {"id": INT8, "note": TEXT})

#: Failpoints in the driver at which a sink may crash; `sink.in_task` is in an executor.
POINTS = [
    "sink.before_write",
    "sink.in_task",
    "sink.after_write",
    "sink.before_commit",
    "sink.after_commit",
    "sink.after_publish",
    "sink.before_position",
    "sink.after_position",
]


@pytest.fixture
def log(tmp_path):
    with HandmadeLog(tmp_path / "log") as written:
        yield written


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    failpoints.arm("")


def fill(log: HandmadeLog, transactions: int = 4, first: int = 0) -> list[int]:
    """Commit transactions that touch both tables; return the boundaries, beginning with the log's start."""
    ends = [log.writer.tail.offset]
    for number in range(first, first + transactions):
        described = (ORDERS, ITEMS) if number == 0 else ()
        ends.append(
            log.commit(
                *described,
                insert(1, number, f"order {number}"),
                insert(2, number, "x"),
                update(1, number, UNCHANGED),
                delete(2, number, None),
            )
        )
    return ends


def both(kind: str, path: Path) -> tuple[list[int], list[int]]:
    return offsets(kind, path / "public.orders"), offsets(kind, path / "public.items")


def require_each_once(kind: str, path: Path, transactions: int) -> None:
    for found in both(kind, path):
        assert len(found) == 2 * transactions
        assert len(set(found)) == len(found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_range_that_is_requested_again_is_written_once(kind, tmp_path, log):
    ends = fill(log)
    sink = opened(kind, tmp_path / "lake", log)
    assert sink.position("0") is None
    commit = write(sink, log, 0, ends[2])
    assert (commit.rows, commit.tables) == (8, 2)
    assert commit.bytes > 0
    assert write(sink, log, 0, ends[2]).rows == 0
    assert write(sink, log, 0, ends[1]).rows == 0
    assert write(sink, log, ends[1], ends[3]).rows == 4
    sink.close()
    sink = opened(kind, tmp_path / "lake", log)
    assert sink.position("0") == sink.reach("0") == ends[3]
    assert write(sink, log, 0, ends[4]).rows == 4
    require_each_once(kind, tmp_path / "lake", 4)


@pytest.mark.parametrize("meanwhile", [False, True], ids=["before a range", "during a range"])
@pytest.mark.parametrize("what", ["lake", "lake/_tailrace"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_committed_to_a_target_that_was_moved_away(
    kind, what, meanwhile, tmp_path, log, monkeypatch
):
    ends = fill(log)
    sink = opened(kind, tmp_path / "lake", log)
    write(sink, log, 0, ends[1])
    write_range = write_job.run

    def write_and_move(*arguments):
        done = write_range(*arguments)
        (tmp_path / what).rename(tmp_path / "away")
        return done

    if meanwhile:
        monkeypatch.setattr(write_job, "run", write_and_move)
    else:
        (tmp_path / what).rename(tmp_path / "away")
    with pytest.raises(TailraceError) as caught:
        write(sink, log, ends[1], ends[2])
    assert caught.value.kind is Kind.SINK_DAMAGED
    assert "put the directory back" in caught.value.hint
    assert not (tmp_path / what).exists()
    sink.close()
    monkeypatch.undo()
    (tmp_path / "away").rename(tmp_path / what)
    sink = opened(kind, tmp_path / "lake", log)
    write(sink, log, sink.position("0") or 0, ends[4])
    require_each_once(kind, tmp_path / "lake", 4)


@pytest.mark.parametrize("wider", WIDTHS)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("kind", KINDS)
def test_after_a_crash_any_later_range_completes_the_interrupted_one(kind, point, wider, tmp_path, log):
    ends = fill(log, 5)
    sink = opened(kind, tmp_path / "lake", log)
    write(sink, log, 0, ends[1])
    failpoints.arm(f"{point}=error")
    with pytest.raises((failpoints.FailpointError, TailraceError)):
        write(sink, log, ends[1], ends[3])
    failpoints.arm("")
    sink.close()  # releases the lock, as the end of the process does

    sink = opened(kind, tmp_path / "lake", log)
    assert sink.position("0") in (ends[1], ends[3])
    write(sink, log, ends[1], ends[3 + wider])
    write(sink, log, sink.position("0") or 0, ends[5])
    require_each_once(kind, tmp_path / "lake", 5)
    staging = tmp_path / "lake" / "_tailrace" / "staging"
    assert not staging.exists() or not os.listdir(staging)


def _crash_with_staging_gone(kind: str, point: str, lake: Path, log: HandmadeLog) -> list[int]:
    ends = fill(log, 4)
    sink = opened(kind, lake, log)
    write(sink, log, 0, ends[1])
    failpoints.arm(f"{point}=error")
    with pytest.raises((failpoints.FailpointError, TailraceError)):
        write(sink, log, ends[1], ends[3])
    failpoints.arm("")
    sink.close()
    shutil.rmtree(lake / "_tailrace" / "staging")
    return ends


@pytest.mark.parametrize("point", ["sink.after_commit", "sink.after_publish", "sink.before_position"])
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_an_unpublished_commit_without_its_staging_folder_is_written_again(kind, point, tmp_path, log):
    lake = tmp_path / "lake"
    ends = _crash_with_staging_gone(kind, point, lake, log)
    sink = opened(kind, lake, log)
    assert sink.position("0") == (ends[1] if point == "sink.after_commit" else ends[3])
    write(sink, log, ends[1], ends[4])
    require_each_once(kind, lake, 4)
    assert not list((lake / "_tailrace").rglob("*.unpublished"))


def test_a_partly_published_commit_without_its_staging_folder_stops_the_sink(tmp_path, log):
    lake = tmp_path / "lake"
    _crash_with_staging_gone("parquet", "sink.after_publish", lake, log)
    max(lake.glob("public.orders/*"), key=lambda path: path.name).unlink()
    with pytest.raises(TailraceError) as raised:
        opened("parquet", lake, log)
    assert raised.value.kind is Kind.SINK_DAMAGED


def test_published_files_that_a_user_deletes_are_not_written_again(tmp_path, log):
    lake = tmp_path / "lake"
    ends = fill(log, 4)
    sink = opened("parquet", lake, log)
    write(sink, log, 0, ends[3])
    sink.close()
    for file in lake.glob("public.*/*"):
        file.unlink()
    sink = opened("parquet", lake, log)
    assert sink.position("0") == ends[3]


@pytest.mark.parametrize("gone", ["????????????????.json", "*"], ids=["manifests", "all records"])
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_files_whose_manifests_somebody_removed_stop_the_sink(kind, gone, tmp_path, log):
    lake, ends = tmp_path / "lake", fill(log, 3)
    sink = opened(kind, lake, log, tables=("public.*",))
    write(sink, log, 0, ends[1])
    between = log.commit(relation(9, "other.t", {"id": INT8}), insert(9, 1))
    (end,) = fill(log, 1, first=4)[1:]
    write(sink, log, ends[1], ends[3])
    write(sink, log, ends[3], between)
    write(sink, log, between, end)
    sink.close()
    for manifest in (lake / "_tailrace" / "manifests" / "0").glob(gone):
        manifest.unlink()
    sink = opened(kind, lake, log, tables=("public.*",))
    identity = log.directory.identity
    for look in (
        *(lambda: sink.position("0"),) * 2,
        lambda: recorded_files_position("lake", lake, kind, "shop", identity, "0"),  # as `check` does
    ):
        with pytest.raises(TailraceError) as raised:
            look()
        assert raised.value.kind is Kind.SINK_DAMAGED
        assert "new, empty path" in raised.value.hint


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_published_files_may_be_deleted_though_a_crash_left_the_staging_folder(
    kind, tmp_path, log, monkeypatch
):
    lake = tmp_path / "lake"
    ends = fill(log, 5)
    sink = opened(kind, lake, log)
    write(sink, log, 0, ends[1])

    def fail(_: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr("tailrace.sinks.files.sink.remove_folder", fail)
        with pytest.raises(TailraceError):
            write(sink, log, ends[1], ends[3])
    sink.close()
    shutil.rmtree(lake / "public.orders")
    max(lake.glob("public.items/*"), key=lambda path: path.name).unlink()
    sink = opened(kind, lake, log)
    assert sink.position("0") == ends[3]
    assert not (lake / "_tailrace" / "staging").exists()
    write(sink, log, ends[3], ends[5])
    assert [len(found) for found in both(kind, lake)] == [4, 8]


def test_staged_files_of_a_commit_that_an_older_version_left_unmarked_are_published(tmp_path, log):
    lake = tmp_path / "lake"
    ends = fill(log, 2)
    sink = opened("parquet", lake, log)
    failpoints.arm("sink.after_commit=error")
    with pytest.raises(failpoints.FailpointError):
        write(sink, log, 0, ends[2])
    failpoints.arm("")
    sink.close()
    [mark] = (lake / "_tailrace").rglob("*.unpublished")
    mark.unlink()
    assert opened("parquet", lake, log).position("0") == ends[2]
    require_each_once("parquet", lake, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_sink_may_repeat_a_failed_write(kind, tmp_path, log):
    ends = fill(log)
    sink = opened(kind, tmp_path / "lake", log)
    for point in POINTS:
        failpoints.arm(f"{point}=eio")
        with contextlib.suppress(OSError, TailraceError):
            write(sink, log, 0, ends[2])
            write(sink, log, ends[2], ends[4])  # only if the first range was written before the failure
    failpoints.arm("")
    write(sink, log, sink.position("0") or 0, ends[4])
    require_each_once(kind, tmp_path / "lake", 4)


@pytest.mark.follows("sink_write_failed")
@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_that_could_not_be_created_is_created_later(kind, tmp_path, log):
    ends = fill(log)
    (tmp_path / "disk").write_bytes(b"a file where the directory is to be")
    with pytest.raises(TailraceError) as raised:
        opened(kind, tmp_path / "disk" / "lake", log)
    assert raised.value.kind is Kind.SINK_WRITE_FAILED
    assert raised.value.hint == "check that the sink's directory exists and is writable"
    (tmp_path / "disk").unlink()
    (tmp_path / "disk").mkdir()
    sink = opened(kind, tmp_path / "disk" / "lake", log)
    write(sink, log, 0, ends[4])
    require_each_once(kind, tmp_path / "disk" / "lake", 4)


@pytest.mark.follows("sink_write_failed")
@pytest.mark.parametrize("kind", KINDS)
def test_a_write_on_a_full_disk_fails_and_may_be_repeated(kind, tmp_path, log):
    ends = fill(log)
    sink = opened(kind, tmp_path / "lake", log)
    failpoints.arm("sink.in_task=enospc")
    with pytest.raises(TailraceError) as raised:
        write(sink, log, 0, ends[4])
    assert raised.value.kind is Kind.SINK_WRITE_FAILED
    assert "room" in raised.value.hint
    write(sink, log, 0, ends[4])
    require_each_once(kind, tmp_path / "lake", 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_range_that_would_leave_a_gap_is_refused(kind, tmp_path, log):
    ends = fill(log)
    sink = opened(kind, tmp_path / "lake", log)
    write(sink, log, 0, ends[1])
    with pytest.raises(TailraceError) as raised:
        write(sink, log, ends[2], ends[3])
    assert raised.value.kind is Kind.LOG_RANGE_INVALID


@pytest.mark.parametrize("kind", KINDS)
def test_a_range_without_changes_moves_the_position_and_writes_no_file(kind, tmp_path, log):
    ends = fill(log, 1)
    sink = opened(kind, tmp_path / "lake", log, tables=("other.*",))
    assert write(sink, log, 0, ends[1]).rows == 0
    assert sink.position("0") == ends[1]
    assert [name for name in os.listdir(tmp_path / "lake") if not name.startswith("_")] == []
    sink.close()
    sink = opened(kind, tmp_path / "lake", log, tables=None)
    assert sink.position("0") == ends[1]
    (end,) = fill(log, 1, first=1)[1:]
    assert write(sink, log, ends[1], end).rows == 4


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_chosen_tables_are_written(kind, tmp_path, log):
    ends = fill(log)
    sink = opened(kind, tmp_path / "lake", log, tables=("public.ord*",))
    assert write(sink, log, 0, ends[4]).tables == 1
    assert not (tmp_path / "lake" / "public.items").exists()


@pytest.mark.follows("sink_locked")
@pytest.mark.parametrize("way", ["stopped", "path of its own"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_engines_cannot_have_one_target(kind, way, tmp_path, log):
    ends = fill(log)
    first = opened(kind, tmp_path / "lake", log)
    with pytest.raises(TailraceError) as raised:
        opened(kind, tmp_path / "lake", log)
    assert raised.value.kind is Kind.SINK_LOCKED
    assert str(os.getpid()) in raised.value.message
    assert raised.value.hint == "stop that engine, or give this sink its own name and path"
    path = tmp_path / "lake"
    if way == "stopped":
        first.close()
    else:
        path = tmp_path / "its own"
    second = opened(kind, path, log)
    write(second, log, 0, ends[4])
    require_each_once(kind, path, 4)
    second.close()


@pytest.mark.parametrize("wider", WIDTHS)
@pytest.mark.parametrize("mode", ["append", "mirror"])
def test_of_two_engines_whose_locks_have_no_effect_the_later_commit_fails(
    mode, wider, tmp_path, log, monkeypatch
):
    monkeypatch.setattr(target, "locked", lambda file, *_: os.open(file, os.O_RDWR | os.O_CREAT))
    start = log.commit(ORDERS, insert(1, 0, "x"))
    ends = [log.commit(*(insert(1, 10 * number + n, "x") for n in range(2))) for number in (1, 2, 3)]
    first, second = (opened(mode, tmp_path / "lake", log) for _ in range(2))
    write(first, log, 0, start)
    of_delta = DeltaFolder.append

    def append(folder, files, version):
        monkeypatch.setattr(DeltaFolder, "append", of_delta)
        write(second, log, start, ends[1 + wider])
        of_delta(folder, files, version)

    monkeypatch.setattr(DeltaFolder, "append", append)
    if wider == 0:  # the outcome of its commit might have been unknown
        write(first, log, start, ends[1])
    else:
        with pytest.raises(TailraceError) as raised:
            write(first, log, start, ends[1])
        assert raised.value.kind is Kind.SINK_FOREIGN
    write(second, log, ends[1 + wider], ends[-1])
    found = DeltaTable(str(tmp_path / "lake" / "public.orders")).to_pyarrow_table()["id"].to_pylist()
    assert sorted(found) == [0, 10, 11, 20, 21, 30, 31]


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_of_another_log_pipeline_or_kind_is_refused(kind, tmp_path, log):
    ends = fill(log)
    sink = opened(kind, tmp_path / "lake", log)
    write(sink, log, 0, ends[4])
    sink.close()
    with HandmadeLog(tmp_path / "new log", slot="another") as other:
        attempts = [
            (make(kind, tmp_path / "lake"), other, "shop"),
            (make(kind, tmp_path / "lake"), log, "bar"),
        ]
        attempts += [
            (make(each, tmp_path / "lake"), log, "shop") for each in [*KINDS, "mirror"] if each != kind
        ]
        for sink, of, pipeline in attempts:
            with pytest.raises(TailraceError) as raised:
                sink.open(of.directory.identity, pipeline)
            assert raised.value.kind is Kind.SINK_FOREIGN
            assert raised.value.hint


@pytest.mark.parametrize("kind", KINDS)
def test_tables_that_the_sink_did_not_create_are_refused(kind, tmp_path, log):
    (tmp_path / "lake" / "public.orders").mkdir(parents=True)
    (tmp_path / "lake" / "public.orders" / "part-0.parquet").write_bytes(b"theirs")
    with pytest.raises(TailraceError) as raised:
        opened(kind, tmp_path / "lake", log)
    assert raised.value.kind is Kind.SINK_FOREIGN


@pytest.mark.parametrize("kind", KINDS)
def test_a_sink_that_is_ahead_of_the_log_is_refused(kind, tmp_path, log):
    ends = fill(log)
    sink = opened(kind, tmp_path / "lake", log)
    write(sink, log, 0, ends[4])
    require_within_log(sink, "0", ends[4])
    with pytest.raises(TailraceError) as raised:
        require_within_log(sink, "0", ends[3])
    assert raised.value.kind is Kind.SINK_AHEAD_OF_LOG


@pytest.mark.parametrize("kind", KINDS)
def test_snapshot_rows_truncates_and_key_changes_are_rows_of_the_history(kind, tmp_path, log):
    log.append(snapshot(900, (1, ORDERS, ["1\tone", "2\ttwo"])))
    log.commit(truncate(1))
    end = log.commit(insert(1, 3, "three"), rekey(1, (3, None), (4, UNCHANGED)))
    sink = opened(kind, tmp_path / "lake", log)
    assert write(sink, log, 0, end).rows == 5
    assert len(offsets(kind, tmp_path / "lake" / "public.orders")) == 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_tables_are_written_by_one_job(kind, tmp_path, log):
    relations = [relation(10 + n, f"many.t{n}", {"id": INT8, "note": TEXT}) for n in range(100)]
    end = log.commit(*relations, *(insert(10 + n, n, "x") for n in range(100)))
    sink = opened(kind, tmp_path / "lake", log)
    assert write(sink, log, 0, end).tables == 100
    assert all(len(offsets(kind, tmp_path / "lake" / f"many.t{n}")) == 1 for n in range(100))


@pytest.mark.parametrize("kind", KINDS)
def test_the_sink_hides_its_own_files_from_readers_of_the_tables(kind, tmp_path, log):
    ends = fill(log)
    sink = opened(kind, tmp_path / "lake", log)
    write(sink, log, 0, ends[4])
    suffix = ".jsonl" if kind == "jsonl" else ".parquet"
    for entry in os.listdir(tmp_path / "lake"):
        assert entry.startswith("_") or "." in entry
    for entry in os.listdir(tmp_path / "lake" / "public.orders"):
        assert entry.startswith(("_", ".")) or entry.endswith(suffix)


@pytest.mark.parametrize("kind", KINDS)
def test_names_in_the_source_cannot_lead_to_a_folder_outside_the_target(kind, tmp_path, log):
    end = log.commit(
        relation(7, "..." + "/../../x", {"id": INT8, "note": TEXT}),
        insert(7, 1, "x"),
    )
    sink = opened(kind, tmp_path / "lake" / "below", log)
    assert write(sink, log, 0, end).rows == 1
    assert sorted(os.listdir(tmp_path / "lake")) == ["below"]
    assert stat.S_ISDIR(os.stat(tmp_path / "lake" / "below").st_mode)


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_record_stops_the_sink(kind, tmp_path, log):
    ends = fill(log)
    sink = opened(kind, tmp_path / "lake", log)
    write(sink, log, 0, ends[4])
    sink.close()
    state = tmp_path / "lake" / "_tailrace"
    record = state / "position-0.json" if kind == "append" else state / "manifests" / "0" / f"{0:016x}.json"
    whole = record.read_bytes()
    for damaged in (whole[:-3], whole.replace(str(ends[4]).encode(), b"7"), b""):
        record.write_bytes(damaged)
        sink = make(kind, tmp_path / "lake")
        with pytest.raises(TailraceError) as raised:  # noqa: PT012 — one or the other notices
            sink.open(log.directory.identity, "shop")
            sink.position("0")
        sink.close()
        assert raised.value.kind is Kind.SINK_DAMAGED
