"""Mirrors that are interrupted, replayed or refused; the merges are small and need no Spark."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable, write_deltalake

from tailrace import failpoints
from tailrace.changelog import runs
from tailrace.changelog.reader import LogReader
from tailrace.config import ColumnPolicy
from tailrace.errors import Kind, TailraceError
from tailrace.join.options import KafkaJoinSection
from tailrace.model import LogRange, ValueModes
from tailrace.protocol import frames
from tailrace.protocol.facts import ColumnFacts, Facts
from tailrace.ranges import changes as range_changes
from tailrace.ranges import plan
from tailrace.sinks.contract import SparkNeededError
from tailrace.sinks.delta import folder as delta_folder
from tailrace.sinks.delta import rewrite
from tailrace.sinks.delta.folder import DeltaFolder
from tailrace.sinks.delta.mirror import files, small_merge
from tailrace.sinks.delta.mirror import sink as mirror
from tailrace.sinks.delta.mirror.net_changes import net
from tailrace.sinks.delta.mirror.sink import DeltaMirror
from tailrace.sinks.delta.sink import DeltaSink
from tailrace.sinks.write_job import SinkInput
from tests.support.sinks.rig import (
    WIDTHS,
    mirror_rows,
    opened,
    rekey,
    relation,
    snapshot,
    update_whole,
    write,
    write_alone,
)
from tests.support.spark.wire import (
    INT4,
    INT8,
    TEXT,
    TIMESTAMP,
    UNCHANGED,
    HandmadeLog,
    delete,
    insert,
    numeric,
    truncate,
    update,
)

COLUMNS = {"id": INT8, "note": TEXT, "n": INT4}
ACCOUNTS = relation(1, "public.accounts", COLUMNS)
#: `sink.before_remove` is passed when a table is read again: `test_repairs`.
POINTS = sorted(name for name in failpoints.NAMES - {"sink.before_remove"} if name.startswith("sink."))


@pytest.fixture
def log(tmp_path):
    with HandmadeLog(tmp_path / "log") as written:
        yield written


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    failpoints.arm("")


def live(log: HandmadeLog, seed: int, transactions: int) -> list[tuple[int, list[dict[str, Any]]]]:
    """Commit random transactions; return each one's boundary with the rows that the source has then."""
    rng = random.Random(seed)
    rows: dict[int, dict[str, Any]] = {}
    story = []
    for number in range(transactions):
        changes = [ACCOUNTS] if number == 0 else []
        for step in range(rng.randrange(1, 8)):
            key, note, n = rng.randrange(12), f"note {number}.{step}", 100 * number + step
            if key not in rows:
                rows[key] = {"id": key, "note": note, "n": n}
                changes.append(insert(1, key, note, n))
            elif rng.random() < 0.3:
                del rows[key]
                changes.append(delete(1, key, None, None))
            elif rng.random() < 0.3 and (free := rng.randrange(12)) not in rows:
                rows[free] = rows.pop(key) | {"id": free, "note": note, "n": n}
                changes.append(rekey(1, (key, None, None), (free, note, n)))
            else:
                rows[key] |= {"n": n}
                changes.append(update(1, key, UNCHANGED, n))
        if rng.random() < 0.1:
            rows.clear()
            changes.append(truncate(1))
        story.append((log.commit(*changes), sorted(map(dict, rows.values()), key=str)))
    return story


def table(path: Path) -> list[dict[str, Any]]:
    return mirror_rows(path / "public.accounts")


@pytest.mark.parametrize("bucket_rows", [1, 2_000_000], ids=["in buckets", "at once"])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.slow
def test_a_mirror_has_the_rows_of_the_source_at_the_end_of_each_range(
    seed, bucket_rows, tmp_path, log, monkeypatch
):
    monkeypatch.setattr(mirror, "BUCKET_ROWS", bucket_rows)
    story = live(log, seed, 30)
    sink = opened("mirror", tmp_path / "lake", log)
    start, rng = 0, random.Random(seed)
    for end, rows in story:
        if end != story[-1][0] and rng.random() < 0.6:
            continue
        write(sink, log, start, end)
        assert table(tmp_path / "lake") == rows, f"seed {seed}, range {start} to {end}"
        start = end


@pytest.mark.parametrize("limit", ["BUCKET_ROWS", "BUCKET_BYTES"])
def test_many_or_large_changes_are_reduced_in_parts(limit, tmp_path, log, monkeypatch):
    parts = []

    def composed(work):
        parts.append(files.compose(work)["rows"])
        return files.compose(work)

    monkeypatch.setattr(mirror, limit, 8 if limit == "BUCKET_ROWS" else 1 << 20)
    monkeypatch.setattr(mirror, "compose", composed)
    log.commit(ACCOUNTS, *(insert(1, key, "x" * (256 << 10), 1) for key in range(8)))
    end = log.commit(*(update(1, key, "y" * (256 << 10), 2) for key in range(8)))
    write_alone(opened("mirror", tmp_path / "lake", log), log, 0, end)
    assert len(parts) > 1
    assert sum(parts) == 8
    assert [row["n"] for row in table(tmp_path / "lake")] == [2] * 8


@pytest.mark.parametrize("key", [("id",), ("tenant", "id"), ("tags",)], ids=["moved", "skewed", "nested"])
def test_large_changes_are_reduced_in_parts_whatever_their_keys(key, tmp_path, log, monkeypatch):
    sizes = []

    def composed(work):
        found = files.compose(work)
        sizes.append(found["net_bytes"])
        return found

    monkeypatch.setattr(mirror, "BUCKET_BYTES", 1 << 20)
    monkeypatch.setattr(mirror, "compose", composed)
    columns = {"tenant": INT4, "id": INT8, "tags": 1007, "note": TEXT}
    large = relation(1, "public.accounts", columns, key=key)
    log.commit(large, *(insert(1, 7, n, f"{{{n}}}", "") for n in range(200, 400)))
    log.commit(*(insert(1, 7, n, f"{{{n}}}", f"{n}" * (256 << 10)) for n in range(8)))
    moved = 8 if key == ("id",) else 0
    if moved:
        later = [rekey(1, (None, n, None, None), (7, n + 8, f"{{{n}}}", UNCHANGED)) for n in range(8)]
    else:
        later = [update(1, 7, n, f"{{{n}}}", UNCHANGED) for n in range(8)]
    end = log.commit(*later, *(delete(1, 7, n, f"{{{n}}}", None) for n in range(100, 104)))
    write_alone(opened("mirror", tmp_path / "lake", log), log, 0, end)
    assert max(sizes) < 1.5 * (1 << 20)
    found = [(row["id"], row["note"][:1]) for row in table(tmp_path / "lake") if row["note"]]
    assert sorted(found) == [(n + moved, f"{n}") for n in range(8)]
    assert len(table(tmp_path / "lake")) == 208


def test_a_merge_into_a_large_table_is_left_to_spark_and_commits_nothing_before(tmp_path, log, monkeypatch):
    begun = log.commit(ACCOUNTS, insert(1, 1, "one", 1), insert(1, 2, "two", 2))
    end = log.commit(update(1, 1, "changed", 1))
    sink = opened("mirror", tmp_path / "lake", log)
    write_alone(sink, log, 0, begun)
    before = table(tmp_path / "lake")
    monkeypatch.setattr(mirror, "IN_PROCESS_TARGET_BYTES_MAX", 1)
    with pytest.raises(SparkNeededError):
        write_alone(sink, log, begun, end)
    assert (sink.position("0"), table(tmp_path / "lake")) == (begun, before)
    write(sink, log, begun, end)
    assert [row["note"] for row in table(tmp_path / "lake")] == ["changed", "two"]


def test_a_merge_of_a_few_large_changes_is_left_to_spark(tmp_path, log, monkeypatch):
    begun = log.commit(ACCOUNTS, insert(1, 1, "one", 1))
    small = log.commit(update(1, 1, "two", 2))
    end = log.commit(update(1, 1, "x" * 10_000, 3))
    sink = opened("mirror", tmp_path / "lake", log)
    monkeypatch.setattr(small_merge, "SOURCE_BYTES_MAX", 10_000)
    write_alone(sink, log, 0, begun)
    write_alone(sink, log, begun, small)
    with pytest.raises(SparkNeededError):
        write_alone(sink, log, small, end)


def test_a_merge_that_takes_unsent_values_from_a_table_with_deletion_vectors_is_left_to_spark(tmp_path, log):
    begun = log.commit(ACCOUNTS, insert(1, 1, "one", 1), insert(1, 2, "two", 2))
    end = log.commit(update(1, 1, UNCHANGED, 5))
    sink = opened("mirror", tmp_path / "lake", log)
    write_alone(sink, log, 0, begun)
    theirs = DeltaTable(str(tmp_path / "lake" / "public.accounts"))
    theirs.alter.set_table_properties({"delta.enableDeletionVectors": "true"})
    with pytest.raises(SparkNeededError):
        write_alone(sink, log, begun, end)


def test_spark_rewrites_a_large_table_and_this_process_a_small_one(tmp_path, log, monkeypatch):
    begun = log.commit(ACCOUNTS, insert(1, 1, "one", 1), insert(1, 2, "two", 2))
    without_note = relation(1, "public.accounts", {"id": INT8, "n": INT4})
    end = log.commit(update(1, 2, "changed", 3), without_note, update(1, 1, 5))
    small, large = (opened("mirror", tmp_path / name, log) for name in ("small", "large"))
    write_alone(small, log, 0, begun)
    write_alone(large, log, 0, begun)
    write_alone(small, log, begun, end)
    monkeypatch.setattr(rewrite, "IN_PROCESS_BYTES_MAX", 1)
    with pytest.raises(SparkNeededError):
        write_alone(large, log, begun, end)
    write(large, log, begun, end)
    assert table(tmp_path / "small") == [{"id": 1, "n": 5}, {"id": 2, "n": 3}]
    assert table(tmp_path / "large") == table(tmp_path / "small")


@pytest.mark.parametrize("wider", WIDTHS)
@pytest.mark.parametrize("point", POINTS)
def test_after_a_crash_a_mirror_continues_with_the_right_rows(point, wider, tmp_path, log):
    story = live(log, 11, 12)
    ends = [end for end, _ in story]
    sink = opened("mirror", tmp_path / "lake", log)
    write(sink, log, 0, ends[3])
    failpoints.arm(f"{point}=error")
    with pytest.raises((failpoints.FailpointError, TailraceError)):
        write(sink, log, ends[3], ends[7])
    failpoints.arm("")
    sink.close()

    sink = opened("mirror", tmp_path / "lake", log)
    write(sink, log, ends[3], ends[7 + wider])
    write(sink, log, sink.position("0") or 0, ends[-1])
    assert table(tmp_path / "lake") == story[-1][1]


def test_a_replayed_range_changes_and_commits_nothing(tmp_path, log):
    story = live(log, 5, 10)
    sink = opened("mirror", tmp_path / "lake", log)
    write(sink, log, 0, story[4][0])
    write(sink, log, story[4][0], story[-1][0])
    version = DeltaTable(str(tmp_path / "lake" / "public.accounts")).version()
    for end, _ in story:
        assert write(sink, log, 0, end).rows == 0
    assert DeltaTable(str(tmp_path / "lake" / "public.accounts")).version() == version
    assert table(tmp_path / "lake") == story[-1][1]


def test_tables_without_changes_are_not_read_in_a_range(tmp_path, log, monkeypatch):
    tables = [(relation(oid, f"public.t{oid}", COLUMNS), insert(oid, 1, "a", 1)) for oid in range(1, 6)]
    ends = [log.commit(*(part for each in tables for part in each))]
    ends += [log.commit(update(1, 1, "a", n)) for n in (2, 3)]
    sink, read = opened("mirror", tmp_path / "lake", log), set()
    of_delta = DeltaFolder.schema
    write_alone(sink, log, 0, ends[0])
    write_alone(sink, log, ends[0], ends[1])
    monkeypatch.setattr(DeltaFolder, "schema", lambda folder: read.add(folder.path.name) or of_delta(folder))
    write_alone(sink, log, ends[1], ends[2])
    assert read == {"public.t1"}


def test_a_sink_that_began_with_the_log_recovers_from_a_lost_position_file(tmp_path, log):
    story = live(log, 5, 10)
    sink = opened("mirror", tmp_path / "lake", log)
    write(sink, log, 0, story[6][0])
    sink.close()
    (tmp_path / "lake" / "_tailrace" / "position-0.json").unlink()
    sink = opened("mirror", tmp_path / "lake", log)
    assert sink.position("0") is None
    write(sink, log, 0, story[-1][0])
    assert table(tmp_path / "lake") == story[-1][1]


def test_a_history_in_whose_place_an_older_copy_was_put_stops_and_gets_what_it_lacks(tmp_path, log):
    lake = tmp_path / "lake"
    items = relation(2, "public.items", COLUMNS)
    ends = [
        log.commit(*described, insert(1, n, "a", n), insert(2, n, "b", n))
        for n, described in enumerate([[ACCOUNTS, items], [], []])
    ]
    sink = opened("append", lake, log)
    write(sink, log, 0, ends[0])
    shutil.copytree(lake / "public.accounts", tmp_path / "copy")
    write(sink, log, ends[0], ends[1])
    sink.close()
    shutil.rmtree(lake / "public.accounts")
    shutil.copytree(tmp_path / "copy", lake / "public.accounts")
    sink = opened("append", lake, log)
    with pytest.raises(TailraceError) as raised:
        write(sink, log, ends[1], ends[2])
    assert raised.value.kind is Kind.SINK_DAMAGED
    assert f"remove {lake / '_tailrace' / 'position-0.json'}" in raised.value.hint
    sink.close()
    (lake / "_tailrace" / "position-0.json").unlink()
    sink = opened("append", lake, log)
    write(sink, log, 0, ends[2])
    for name in ("public.accounts", "public.items"):
        rows = DeltaTable(str(lake / name)).to_pyarrow_table(columns=["id"])
        assert sorted(rows["id"].to_pylist()) == [0, 1, 2]


@pytest.mark.parametrize("has_checkpoint", [False, True], ids=["", "with a checkpoint"])
@pytest.mark.parametrize("kept", [0, 60], ids=["nothing of it", "a part of it"])
@pytest.mark.parametrize("kind", ["append", "mirror"])
def test_a_commit_that_a_loss_of_power_cut_short_is_written_again(kind, kept, has_checkpoint, tmp_path, log):
    ends = [log.commit(*changes) for changes in ([ACCOUNTS, insert(1, 1, "a", 1)], [insert(1, 2, "b", 2)])]
    state, commits = (tmp_path / "lake" / name for name in ("_tailrace", "public.accounts/_delta_log"))
    sink = opened(kind, tmp_path / "lake", log)
    write(sink, log, 0, ends[0])
    if has_checkpoint:
        DeltaTable(str(commits.parent)).alter.set_table_properties({"delta.checkpointInterval": "1"})
    position = (state / "position-0.json").read_bytes()
    write(sink, log, ends[0], ends[1])
    sink.close()
    # The sink records its position once a commit is on disk; so this commit was not on disk.
    (state / "position-0.json").write_bytes(position)
    last = max(commits.glob("*.json"))
    torn = [last, *commits.glob(f"{last.stem}.checkpoint.parquet")]
    assert len(torn) == 1 + has_checkpoint
    for path in torn:
        path.write_bytes(path.read_bytes()[:kept])
    sink = opened(kind, tmp_path / "lake", log)
    if kept or has_checkpoint:
        with pytest.raises(TailraceError) as refused:
            write(sink, log, ends[0], ends[1])
        assert "remove the first file _delta_log/<version>.json" in refused.value.hint
        for path in torn:
            path.unlink()
        (commits / "_last_checkpoint").unlink(missing_ok=True)
    write(sink, log, ends[0], ends[1])
    sink.close()
    found = DeltaTable(str(tmp_path / "lake" / "public.accounts")).to_pyarrow_table(columns=["id"])
    assert sorted(found["id"].to_pylist()) == [1, 2]


@pytest.mark.parametrize("keyless", ["refuse", "full_row"])
def test_any_change_of_type_is_followed_in_the_range_in_which_the_table_was_emptied(keyless, tmp_path, log):
    first = log.commit(ACCOUNTS, insert(1, 1, "a", 1), insert(1, 2, "b", 2))
    changed = relation(1, "public.accounts", COLUMNS | {"note": INT4})
    log.commit(truncate(1))
    second = log.commit(changed, insert(1, 3, 30, 3))
    third = log.commit(update(1, 3, 31, 3))
    sink = opened("mirror", tmp_path / "lake", log, keyless=keyless)
    for start, end in pairwise([0, first, second, third]):
        write(sink, log, start, end)
    assert mirror_rows(tmp_path / "lake" / "public.accounts") == [{"id": 3, "note": 31, "n": 3}]


@pytest.mark.follows("sink_schema_refused")
@pytest.mark.parametrize("kind", ["append", "mirror"])
def test_a_feature_that_delta_rs_can_not_write_stops_the_sink_until_it_has_another_path(kind, tmp_path, log):
    first = log.commit(ACCOUNTS, insert(1, 1, "a", 1), insert(1, 2, "b", 2))
    second = log.commit(update(1, 1, "c", 3))
    sink = opened(kind, tmp_path / "lake", log)
    write(sink, log, 0, first)
    commits = tmp_path / "lake" / "public.accounts" / "_delta_log"
    features = {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": ["rowTracking"]}
    (commits / f"{1:020d}.json").write_text(json.dumps({"protocol": features}) + "\n")
    with pytest.raises(TailraceError) as refused:
        write(sink, log, first, second)
    sink.close()
    assert refused.value.kind is Kind.SINK_SCHEMA_REFUSED
    assert "give the sink a new, empty path" in refused.value.hint
    sink = opened(kind, tmp_path / "other", log)
    write(sink, log, 0, second)
    found = DeltaTable(str(tmp_path / "other" / "public.accounts")).to_pyarrow_table(columns=["note"])
    assert {"b", "c"} <= set(found["note"].to_pylist())


def test_rows_beyond_all_keys_are_appended_and_others_are_merged(tmp_path, log):
    sink = opened("mirror", tmp_path / "lake", log)
    start, operations = 0, []
    for changes in (
        [ACCOUNTS, insert(1, 1, "a", 1), insert(1, 5, "b", 5)],
        [insert(1, 7, "c", 7), insert(1, 6, "d", 6)],
        [insert(1, 2, "e", 2), insert(1, 9, "f", 9)],
        [update(1, 9, UNCHANGED, 90)],
        [insert(1, 10, "g", 10), delete(1, 10, None, None)],
        [insert(1, 11, "h", 11)],
    ):
        end = log.commit(*changes)
        write(sink, log, start, end)
        start = end
        (last,) = DeltaTable(str(tmp_path / "lake" / "public.accounts")).history(1)
        operations.append(last["operation"])
    assert operations == ["CREATE TABLE", "WRITE", "MERGE", "MERGE", "MERGE", "WRITE"]
    found = {row["id"]: row["n"] for row in table(tmp_path / "lake")}
    assert found == {1: 1, 2: 2, 5: 5, 6: 6, 7: 7, 9: 90, 11: 11}


def test_a_mirror_begins_with_a_snapshot_and_applies_the_changes_after_it(tmp_path, log):
    log.append(snapshot(900, (1, ACCOUNTS, ["1\tone\t1", "2\ttwo\t2", "3\t\\N\t3"])))
    middle = log.writer.sync().offset
    end = log.commit(update(1, 2, UNCHANGED, 20), delete(1, 1, None, None))
    sink = opened("mirror", tmp_path / "lake", log)
    write(sink, log, 0, middle)
    write(sink, log, middle, end)
    assert table(tmp_path / "lake") == [{"id": 2, "note": "two", "n": 20}, {"id": 3, "note": None, "n": 3}]


def test_repeated_snapshot_rows_of_a_topic_give_each_key_one_row(tmp_path, log):
    log.append(snapshot(1, (1, ACCOUNTS, ["1\tone\t1", "2\ttwo\t2", "1\tchanged\t10"])))
    log.append(snapshot(1, (1, ACCOUNTS, ["2\tchanged\t20", "3\tthree\t3"])))
    end = log.writer.sync().offset
    for lake, taken in (("at once", write_alone), ("in splits", write)):
        sink = opened("mirror", tmp_path / lake, log, reads_once=KafkaJoinSection.snapshot_has_keys_once)
        taken(sink, log, 0, end)
        assert table(tmp_path / lake) == [
            {"id": 1, "note": "changed", "n": 10},
            {"id": 2, "note": "changed", "n": 20},
            {"id": 3, "note": "three", "n": 3},
        ]


def test_a_value_that_was_never_sent_is_null_and_marked_as_unknown(tmp_path, log):
    middle = log.commit(ACCOUNTS, insert(1, 1, "one", 1))
    end = log.commit(update(1, 2, UNCHANGED, 2))
    sink = opened("mirror", tmp_path / "lake", log)
    write(sink, log, 0, middle)
    write(sink, log, middle, end)
    found = DeltaTable(str(tmp_path / "lake" / "public.accounts")).to_pyarrow_table().to_pylist()
    (unknown,) = [row for row in found if row["id"] == 2]
    assert (unknown["note"], unknown["n"]) == (None, 2)
    assert unknown["_position"]["special"] == [("note", None)]


@pytest.mark.parametrize("buffered", [1, 64 << 20], ids=["reduced on the way", "reduced at the end"])
def test_a_row_with_a_changed_key_takes_no_value_from_the_next_row_with_its_old_key(
    buffered, tmp_path, log, monkeypatch
):
    monkeypatch.setattr(files, "BUFFERED_BYTES_MAX", buffered)
    monkeypatch.setattr(runs, "RUN_BYTES_MAX", 1)  # each transaction's changes are decoded apart
    monkeypatch.setattr(range_changes, "DECODED_BYTES_MAX", 1)
    moved = rekey(1, (1, None, None), (2, UNCHANGED, 1))
    log.commit(ACCOUNTS, moved, insert(1, 1, "another row's", 2), update(1, 2, UNCHANGED, 3))
    end = log.commit(insert(1, 5, "later", 5))
    with LogReader.open(log.path, "0") as reader:
        (split,) = plan.input_splits("0", reader.blocks(0, end), 0, end)
    sink = opened("mirror", tmp_path / "lake", log)
    sink.write(None, log.path, LogRange("0", 0, end), [split])
    assert {row["id"]: row["note"] for row in table(tmp_path / "lake")} == {
        1: "another row's",
        2: None,  # never sent: the row is older than the log
        5: "later",
    }


def test_changes_that_cannot_be_reduced_are_not_reduced_again_and_again(tmp_path, log, monkeypatch):
    monkeypatch.setattr(files, "BUFFERED_BYTES_MAX", 1)
    monkeypatch.setattr(runs, "RUN_BYTES_MAX", 1)  # each transaction's changes come apart
    monkeypatch.setattr(range_changes, "DECODED_BYTES_MAX", 1)
    reduced = []
    monkeypatch.setattr(files, "net", lambda *args: reduced.append(1) or net(*args))
    ends = [log.commit(*([ACCOUNTS] if n == 0 else []), insert(1, n, "a", n)) for n in range(64)]
    with LogReader.open(log.path, "0") as reader:
        (split,) = plan.input_splits("0", reader.blocks(0, ends[-1]), 0, ends[-1])
    opened("mirror", tmp_path / "lake", log).write(None, log.path, LogRange("0", 0, ends[-1]), [split])
    assert len(reduced) < 12
    assert [row["n"] for row in sorted(table(tmp_path / "lake"), key=lambda row: row["id"])] == [*range(64)]


def test_a_column_may_have_a_name_that_a_small_merge_uses(tmp_path, log):
    columns = {"id": INT8, "big": TEXT, "_left_0": TEXT}
    middle = log.commit(relation(1, "public.t", columns), insert(1, 1, "long", "a"))
    end = log.commit(update(1, 1, UNCHANGED, "b"), insert(1, 2, "other", "c"))
    sink = opened("mirror", tmp_path / "lake", log)
    write_alone(sink, log, 0, middle)
    write_alone(sink, log, middle, end)
    found = [tuple(row.values()) for row in mirror_rows(tmp_path / "lake" / "public.t")]
    assert found == [(1, "long", "b"), (2, "other", "c")]


def test_a_table_without_a_key_is_refused_and_the_hint_says_what_to_do(tmp_path, log):
    end = log.commit(relation(2, 'public.no"key', {"a": TEXT}, key=()), insert(2, "x"))
    sink = opened("mirror", tmp_path / "lake", log)
    with pytest.raises(TailraceError) as raised:
        write(sink, log, 0, end)
    assert raised.value.kind is Kind.SINK_KEY_MISSING
    assert raised.value.context["table"] == 'public.no"key'
    assert 'ALTER TABLE public."no""key" REPLICA IDENTITY FULL' in raised.value.hint
    assert sink.position("0") == 0
    sink.close()
    without = opened("mirror", tmp_path / "lake", log, tables=("public.accounts",))
    write(without, log, 0, end)
    assert without.position("0") == end


def test_a_key_changed_in_the_configuration_stops_a_mirror(tmp_path, log):
    def keyed(*columns):
        keys = {"public.visits": columns} if columns else {}
        sink = DeltaSink(
            "lake", tmp_path / "lake", DeltaMirror(), SinkInput(rules=ColumnPolicy(message_keys=keys))
        )
        sink.open(log.directory.identity, "shop")
        return sink

    visits = relation(2, "public.visits", {"host": TEXT, "at": INT4, "n": INT4}, key=(), identity="f")
    middle = log.commit(visits, insert(2, "a", 1, 1), insert(2, "a", 2, 2), insert(2, "b", 1, 3))
    sink = keyed("host", "at")
    write(sink, log, 0, middle)
    sink.close()
    end = log.commit(insert(2, "a", 3, 4), update_whole(2, ("b", 1, 3), ("b", 1, 5)))
    for columns in (("host",), ("host", "at", "n")):
        sink = keyed(*columns)
        with pytest.raises(TailraceError) as raised:
            write(sink, log, middle, end)
        assert raised.value.kind is Kind.SINK_SCHEMA_REFUSED
        assert "(host, at)" in raised.value.message
        assert "source.message_keys" in raised.value.hint
        assert sink.position("0") == middle
        sink.close()
    write(keyed("at", "host"), log, middle, end)  # the table's order of columns counts
    found = [tuple(row.values()) for row in mirror_rows(tmp_path / "lake" / "public.visits")]
    assert found == [("a", 1, 1), ("a", 2, 2), ("a", 3, 4), ("b", 1, 5)]


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (ValueModes(binary="base64"), ValueModes(binary="hex"), "raw"),
        (ValueModes(time="adaptive"), ValueModes(time="nanoseconds"), "at"),
        (ValueModes(), ValueModes(interval="string"), "spans"),
        (ValueModes(), ValueModes(decimal="double"), "price"),
    ],
)
def test_a_changed_value_mode_stops_a_mirror(before, after, found, tmp_path, log):
    def given(modes):
        sink = DeltaSink("lake", tmp_path / "lake", DeltaMirror(), SinkInput(modes=modes))
        sink.open(log.directory.identity, "shop")
        return sink

    columns = {"id": INT8, "raw": 17, "at": 1083, "spans": 1187, "price": numeric(6, 2), "day": 1114}
    row = (1, "\\x00ff", "01:02:03", "{1 day}", "1.50", "2024-01-01 00:00:00")
    middle = log.commit(relation(2, "public.odd", columns), insert(2, *row))
    end = log.commit(insert(2, 2, *row[1:]))
    sink = given(before)
    write(sink, log, 0, middle)
    sink.close()
    sink = given(after)
    with pytest.raises(TailraceError) as raised:
        write(sink, log, middle, end)
    assert raised.value.kind is Kind.SINK_SCHEMA_REFUSED
    assert found in raised.value.message + str(raised.value.context)
    sink.close()
    # A setting that concerns JSON alone does not matter to a mirror.
    write(given(replace(before, unavailable_placeholder="?", hstore="map")), log, middle, end)
    assert len(mirror_rows(tmp_path / "lake" / "public.odd")) == 2


def test_a_mirror_follows_a_key_that_the_database_changes(tmp_path, log):
    columns = {"id": INT8, "no": INT4}
    edges = [0, log.commit(relation(1, "public.t", columns), insert(1, 1, 10))]
    edges.append(log.commit(relation(1, "public.t", columns, key=("no",)), update(1, 2, 10)))
    sink = opened("mirror", tmp_path / "lake", log)
    for start, end in pairwise(edges):
        write(sink, log, start, end)
    assert mirror_rows(tmp_path / "lake" / "public.t") == [{"id": 2, "no": 10}]


@pytest.mark.parametrize("begun", [False, True], ids=["a new table", "a table with rows"])
def test_a_crash_between_the_commits_of_two_keys_in_one_range_loses_no_row(begun, tmp_path, log, monkeypatch):
    columns = {"id": INT8, "no": INT8}
    start, rows = 0, [{"id": number, "no": number} for number in (1, 2, 3, 4)]
    sink = opened("mirror", tmp_path / "lake", log)
    if begun:
        start = log.commit(relation(1, "public.t", columns), insert(1, 0, 0))
        write_alone(sink, log, 0, start)
        rows.insert(0, {"id": 0, "no": 0})
    by_id = [relation(1, "public.t", columns), *(insert(1, number, number) for number in (1, 2, 3))]
    end = log.commit(*by_id, relation(1, "public.t", columns, key=("no",)), insert(1, 4, 4))

    def append(folder, files, version):
        if version == end:
            raise failpoints.FailpointError("the second commit")
        of_deltas(folder, files, version)

    of_deltas = DeltaFolder.append
    monkeypatch.setattr(DeltaFolder, "append", append)
    with pytest.raises(failpoints.FailpointError):
        write_alone(sink, log, start, end)
    monkeypatch.undo()
    assert mirror_rows(tmp_path / "lake" / "public.t") == rows[:-1]
    write_alone(sink, log, start, end)
    assert mirror_rows(tmp_path / "lake" / "public.t") == rows


def test_a_table_that_takes_the_name_of_another_in_a_range_does_not_share_its_net_changes(
    tmp_path, log, monkeypatch
):
    columns = {"id": TEXT, "n": INT8}
    log.commit(relation(1, "public.a", columns), insert(1, "x", 1))
    log.commit(relation(1, "public.b", columns), insert(1, "y", 2))
    log.commit(relation(2, "public.a", columns), insert(2, "p", 10))
    end = log.commit(insert(2, "q", 20))
    both_composed = threading.Barrier(2)

    def composed(work):
        found = files.compose(work)
        both_composed.wait(10)
        return found

    monkeypatch.setattr(mirror, "compose", composed)
    sink = opened("mirror", tmp_path / "lake", log)
    write_alone(sink, log, 0, end)
    found = {name: mirror_rows(tmp_path / "lake" / f"public.{name}") for name in ("a", "b")}
    assert found == {
        "a": [{"id": "p", "n": 10}, {"id": "q", "n": 20}],
        "b": [{"id": "x", "n": 1}, {"id": "y", "n": 2}],
    }


def test_a_mirror_without_a_key_keeps_equal_rows_of_its_first_range(tmp_path, log):
    described = relation(2, "public.rows", {"a": TEXT}, key=(), identity="f")
    end = log.commit(described, insert(2, "x"), insert(2, "x"), insert(2, "y"))
    sink = opened("mirror", tmp_path / "lake", log, keyless="full_row")
    write(sink, log, 0, end)
    assert mirror_rows(tmp_path / "lake" / "public.rows") == [{"a": "x"}, {"a": "x"}, {"a": "y"}]


@pytest.mark.parametrize("kind", ["append", "mirror"])
def test_a_type_change_that_cannot_be_followed_stops_the_sink_before_it_changes_anything(kind, tmp_path, log):
    middle = log.commit(relation(1, "public.t", {"id": INT8, "note": TEXT}), insert(1, 1, "a"))
    end = log.commit(relation(1, "public.t", {"id": INT8, "note": INT4}), insert(1, 2, "7"))
    sink = opened(kind, tmp_path / "lake", log)
    write(sink, log, 0, middle)
    before = DeltaTable(str(tmp_path / "lake" / "public.t")).version()
    with pytest.raises(TailraceError) as raised:
        write(sink, log, middle, end)
    assert raised.value.kind is Kind.SINK_SCHEMA_REFUSED
    assert raised.value.context["table"] == "public.t"
    assert raised.value.context["column"] == "note"
    assert "choose" in raised.value.hint
    assert DeltaTable(str(tmp_path / "lake" / "public.t")).version() == before
    assert sink.position("0") == middle


def test_a_type_change_that_keeps_the_values_is_recorded_for_the_next_change(tmp_path, log):
    versions = [relation(1, "public.t", {"id": INT8, "at": (TIMESTAMP, digits)}) for digits in (3, 6, 3)]
    sink = opened("mirror", tmp_path / "lake", log)
    start = 0
    for number, described in enumerate(versions[:2]):
        end = log.commit(described, insert(1, number, f"2020-01-01 00:00:00.{number:06}"))
        write(sink, log, start, end)
        start = end
    end = log.commit(versions[2], insert(1, 2, "2020-01-01 00:00:00"))
    with pytest.raises(TailraceError) as raised:  # PostgreSQL has rounded the values, the mirror has not
        write(sink, log, start, end)
    assert raised.value.context["column"] == "at"


def test_an_added_column_is_added_to_the_history_once(tmp_path, log):
    middle = log.commit(relation(1, "public.t", {"id": INT8}), insert(1, 1))
    end = log.commit(insert(1, 2), relation(1, "public.t", {"id": INT8, "more": TEXT}), insert(1, 3, "x"))
    sink = opened("append", tmp_path / "lake", log)
    write(sink, log, 0, middle)
    failpoints.arm("sink.before_commit=error")
    with pytest.raises(failpoints.FailpointError):
        write(sink, log, middle, end)
    failpoints.arm("")
    write(sink, log, middle, end)
    found = DeltaTable(str(tmp_path / "lake" / "public.t")).to_pyarrow_table().sort_by("_log_offset")
    assert found.select(["id", "more"]).to_pylist() == [
        {"id": 1, "more": None},
        {"id": 2, "more": None},
        {"id": 3, "more": "x"},
    ]


def test_a_dropped_column_leaves_the_mirror_and_a_later_one_of_that_name_is_a_new_column(tmp_path, log):
    middle = log.commit(relation(1, "public.t", COLUMNS), insert(1, 1, "a", 1), insert(1, 5, "b", 2))
    narrow = relation(1, "public.t", {"id": INT8, "n": INT4})
    end = log.commit(narrow, update(1, 1, 10), insert(1, 2, 20))
    later = log.commit(relation(1, "public.t", COLUMNS), insert(1, 3, "again", 3))
    sink = opened("mirror", tmp_path / "lake", log)
    write(sink, log, 0, middle)
    write(sink, log, middle, end)
    write(sink, log, end, later)
    assert mirror_rows(tmp_path / "lake" / "public.t") == [
        {"id": 1, "note": None, "n": 10},
        {"id": 2, "note": None, "n": 20},
        {"id": 3, "note": "again", "n": 3},
        {"id": 5, "note": None, "n": 2},
    ]


@pytest.mark.parametrize("older", [False, True], ids=["removed", "older copy"])
@pytest.mark.parametrize("restarted", [False, True], ids=["while it runs", "before a start"])
def test_a_table_of_a_mirror_that_somebody_removes_or_sets_back_stops_it_until_it_is_read_again(
    restarted, older, tmp_path, log
):
    def described(read_from=0):
        columns = tuple(ColumnFacts(name, number) for number, name in enumerate(COLUMNS, 1))
        facts = Facts(1, "public", "accounts", ("id",), columns, version=1, read_from=read_from)
        return frames.control_frame(frames.FACTS, 0, 0, facts.as_json()) + ACCOUNTS

    folder = tmp_path / "lake" / "public.accounts"
    first = log.commit(described(), insert(1, 2, "two", 2), insert(1, 3, "three", 2))
    middle = log.commit(insert(1, 1, "one", 1), delete(1, 3, None, None))
    others = log.commit(relation(2, "public.items", COLUMNS), insert(2, 1, "one", 1))
    end = log.commit(update(1, 2, "two", 3))
    sink = opened("mirror", tmp_path / "lake", log)
    write_alone(sink, log, 0, first)
    shutil.copytree(folder, tmp_path / "copy")
    write_alone(sink, log, first, middle)
    if restarted:
        sink.close()
        sink = opened("mirror", tmp_path / "lake", log)
    shutil.rmtree(folder)
    if older:
        shutil.copytree(tmp_path / "copy", folder)
    write_alone(sink, log, middle, others)
    for _ in range(2):  # delta-rs fails if a file disappears between two reads; the retry reads the whole log
        with pytest.raises(TailraceError) as raised:
            write_alone(sink, log, others, end)
    assert raised.value.kind is Kind.SINK_DAMAGED
    assert "snapshot FILE --table public.accounts" in raised.value.hint
    assert older or not folder.exists()
    last = log.commit(described(end), insert(1, 1, "one", 1), insert(1, 2, "two", 3))
    write_alone(sink, log, others, end)
    write_alone(sink, log, end, last)
    assert [row["n"] for row in table(tmp_path / "lake")] == [1, 3]


def test_a_renamed_table_that_was_read_again_while_it_was_empty_gets_its_next_rows(tmp_path, log):
    def described(name, version, read_from=0):
        columns = tuple(ColumnFacts(column, number) for number, column in enumerate(COLUMNS, 1))
        facts = Facts(1, "public", name, ("id",), columns, version=version, read_from=read_from)
        told = frames.control_frame(frames.FACTS, 0, 0, facts.as_json())
        return told + relation(1, f"public.{name}", COLUMNS)

    ends = [log.commit(described("accounts", 1), insert(1, 1, "one", 1)), log.commit(truncate(1))]
    ends += [log.commit(described("renamed", 2, ends[-1]))]
    ends += [log.commit(insert(1, 2, "two", 2))]
    sink, start = opened("mirror", tmp_path / "lake", log), 0
    for end in ends:
        write_alone(sink, log, start, end)
        start = end
    assert [row["id"] for row in mirror_rows(tmp_path / "lake" / "public.renamed")] == [2]


@pytest.mark.parametrize("kind", ["append", "mirror"])
def test_a_table_that_was_given_a_column_mapping_is_left_as_it_is(kind, tmp_path, log):
    begun = log.commit(ACCOUNTS, insert(1, 1, "one", 1))
    end = log.commit(insert(1, 2, "two", 2))
    sink = opened(kind, tmp_path / "lake", log)
    write(sink, log, 0, begun)
    commits = tmp_path / "lake" / "public.accounts" / "_delta_log"
    found = (json.loads(line) for line in (commits / f"{0:020d}.json").read_text().splitlines())
    metadata = next(action["metaData"] for action in found if "metaData" in action)
    schema = json.loads(metadata["schemaString"])
    inner = [each for field in schema["fields"] if isinstance(field["type"], dict)
             for each in field["type"].get("fields", [])]  # fmt: skip
    for number, field in enumerate([*schema["fields"], *inner], 1):
        mapping = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": field["name"]}
        field["metadata"] |= mapping
    schema["fields"][1]["name"] = "renamed"
    metadata["schemaString"] = json.dumps(schema)
    metadata["configuration"] |= {"delta.columnMapping.mode": "name"}
    actions = [{"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}}, {"metaData": metadata}]
    (commits / f"{1:020d}.json").write_text("".join(f"{json.dumps(each)}\n" for each in actions))
    with pytest.raises(TailraceError) as raised:
        write(sink, log, begun, end)
    assert raised.value.kind is Kind.SINK_SCHEMA_REFUSED
    assert "column mapping" in raised.value.message
    assert DeltaTable(str(commits.parent)).version() == 1


@pytest.mark.parametrize("kind", ["append", "mirror"])
def test_a_table_that_was_given_partitions_or_constraints_gets_no_rows_until_it_has_none(kind, tmp_path, log):
    begun = log.commit(ACCOUNTS, insert(1, 1, "one", 1))
    end = log.commit(insert(1, 2, "two", 2))
    last = log.commit(insert(1, 3, "three", 3))
    sink = opened(kind, tmp_path / "lake", log)
    write(sink, log, 0, begun)
    folder = str(tmp_path / "lake" / "public.accounts")
    rows = DeltaTable(folder).to_pyarrow_table()
    write_deltalake(folder, rows, mode="overwrite", schema_mode="overwrite", partition_by=["note"])
    with pytest.raises(TailraceError) as raised:
        write(sink, log, begun, end)
    assert raised.value.kind is Kind.SINK_SCHEMA_REFUSED
    assert "partitions" in raised.value.message
    write_deltalake(folder, rows, mode="overwrite", schema_mode="overwrite", partition_by=[])
    write(sink, log, begun, end)
    DeltaTable(folder).alter.add_constraint({"few": "id < 3"})
    with pytest.raises(TailraceError) as raised:
        write(sink, log, end, last)
    assert raised.value.kind is Kind.SINK_SCHEMA_REFUSED
    assert "CHECK constraints" in raised.value.message
    DeltaTable(folder).alter.drop_constraint("few")
    write(sink, log, end, last)
    found = DeltaTable(folder).to_pyarrow_table().to_pylist()
    assert sorted((row["id"], row["note"]) for row in found) == [(1, "one"), (2, "two"), (3, "three")]


def test_a_mirror_stops_at_a_table_from_which_nothing_may_be_removed(tmp_path, log):
    ends = [
        0,
        log.commit(ACCOUNTS, insert(1, 1, "one", 1)),
        log.commit(truncate(1)),
        log.commit(insert(1, 2, "b", 2)),
    ]
    sink = opened("mirror", tmp_path / "lake", log)
    write(sink, log, 0, ends[1])
    table = DeltaTable(str(tmp_path / "lake" / "public.accounts"))
    table.alter.set_table_properties({"delta.appendOnly": "true"})
    with pytest.raises(TailraceError, match=r"it was given delta\.appendOnly") as refused:
        write(sink, log, *ends[1:3])
    assert refused.value.kind is Kind.SINK_SCHEMA_REFUSED
    assert "UNSET TBLPROPERTIES ('delta.appendOnly')" in refused.value.hint
    table.alter.set_table_properties({"delta.appendOnly": "false"})
    for start, end in pairwise(ends[1:]):
        write(sink, log, start, end)
    assert [row["id"] for row in mirror_rows(tmp_path / "lake" / "public.accounts")] == [2]


def test_a_history_from_which_nothing_may_be_removed_is_appended_to_and_stops_at_another_type(tmp_path, log):
    wider = relation(1, "public.accounts", COLUMNS | {"n": INT8})
    ends = [0, log.commit(ACCOUNTS, insert(1, 1, "one", 1)), log.commit(insert(1, 2, "b", 2))]
    ends.append(log.commit(wider, insert(1, 3, "c", 3)))
    sink = opened("append", tmp_path / "lake", log)
    write(sink, log, *ends[:2])
    table = DeltaTable(str(tmp_path / "lake" / "public.accounts"))
    table.alter.set_table_properties({"delta.appendOnly": "true"})
    write(sink, log, *ends[1:3])
    with pytest.raises(TailraceError, match="append-only") as refused:
        write(sink, log, *ends[2:])
    assert refused.value.kind is Kind.SINK_SCHEMA_REFUSED
    assert "UNSET TBLPROPERTIES ('delta.appendOnly')" in refused.value.hint
    assert len(DeltaTable(table.table_uri).to_pyarrow_table()) == 2


@pytest.mark.parametrize("unsent", [False, True], ids=["all was sent", "a value was not sent"])
def test_rows_older_than_a_column_have_the_default_that_its_type_cannot_hold(unsent, tmp_path, log):
    columns = {"id": (INT8, -1), "note": (TEXT, -1)}
    wider = columns | {"at": (TIMESTAMP, -1), "price": numeric(6, 2)}

    def described(names, version, **missing):
        held = tuple(
            ColumnFacts(name, number, "", oid, modifier, oid, modifier, missing=missing.get(name))
            for number, (name, (oid, modifier)) in enumerate(names.items(), 1)
        )
        facts = Facts(1, "public", "t", ("id",), held, version=version)
        return frames.control_frame(frames.FACTS, 0, 0, facts.as_json()) + relation(1, "public.t", names)

    gone = [delete(1, 1, None), delete(1, 2, None)] if unsent else []
    middle = log.commit(described(columns, 1), insert(1, 1, "one"), insert(1, 2, "two"), *gone)
    end = log.commit(
        insert(1, 3, "three"),
        update(1, 2, UNCHANGED if unsent else "two"),
        described(wider, 2, at="infinity", price="NaN"),
        insert(1, 4, "four", *(("2020-01-01 00:00:00", "1") if unsent else ("infinity", "NaN"))),
    )
    sink = opened("mirror", tmp_path / "lake", log)
    write_alone(sink, log, 0, middle)
    if unsent:  # delta-rs would not keep the texts
        with pytest.raises(SparkNeededError):
            write_alone(sink, log, middle, end)
        return
    write_alone(sink, log, middle, end)
    held = DeltaTable(str(tmp_path / "lake" / "public.t")).to_pyarrow_table()
    held = held.set_column(2, "at", held["at"].cast("int64")).to_pylist()
    special = [("at", "infinity"), ("price", "NaN")]
    assert {row["id"] for row in held} == {1, 2, 3, 4}
    for row in held:
        assert (row["at"], row["price"], sorted(row["_position"]["special"])) == (2**63 - 1, None, special)


@pytest.mark.parametrize("kind", ["append", "mirror"])
def test_commits_of_a_failed_write_are_synced_before_the_position_is_recorded(
    kind, tmp_path, log, monkeypatch
):
    start = log.commit(*(relation(oid, f"public.t{oid}", COLUMNS) for oid in (1, 2)),
                       *(insert(oid, 1, "a", 1) for oid in (1, 2)))  # fmt: skip
    end = log.commit(*(insert(oid, 2, "b", 2) for oid in (1, 2)))
    sink = opened(kind, tmp_path / "lake", log)
    write_alone(sink, log, 0, start)

    def append(folder, files, version):
        if folder.table == "public.t2":
            raise failpoints.FailpointError("the other table")
        of_deltas(folder, files, version)

    of_deltas = DeltaFolder.append
    with monkeypatch.context() as patched:
        patched.setattr(DeltaFolder, "append", append)
        with pytest.raises(failpoints.FailpointError):
            write_alone(sink, log, start, end)
    sink.close()
    synced = []
    monkeypatch.setattr(delta_folder, "sync_file", lambda path: synced.append(str(path)))
    sink = opened(kind, tmp_path / "lake", log)
    write_alone(sink, log, start, end)
    for name in ("public.t1", "public.t2"):
        delta = DeltaTable(str(tmp_path / "lake" / name))
        assert str(tmp_path / "lake" / name / "_delta_log" / f"{delta.version():020d}.json") in synced
        assert {uri.removeprefix("file://") for uri in delta.file_uris()} <= set(synced)


def commit_without_sync(sink, log, start, end, monkeypatch):
    """Write a range up to its commits, which are not made durable; close the sink."""

    def crash(*_):
        raise failpoints.FailpointError("before the commit is on disk")

    with monkeypatch.context() as patched:
        patched.setattr(DeltaFolder, "make_durable", crash)
        with pytest.raises(failpoints.FailpointError):
            write_alone(sink, log, start, end)
    sink.close()


@pytest.mark.parametrize("kind", ["append", "mirror"])
def test_a_commit_cut_short_by_a_loss_of_power_is_written_again_once_it_is_removed(
    kind, tmp_path, log, monkeypatch
):
    start = log.commit(ACCOUNTS, insert(1, 1, "one", 1))
    end = log.commit(insert(1, 2, "two", 2))
    sink = opened(kind, tmp_path / "lake", log)
    write_alone(sink, log, 0, start)

    commit_without_sync(sink, log, start, end, monkeypatch)
    last = max((tmp_path / "lake" / "public.accounts" / "_delta_log").glob("*.json"))
    last.write_bytes(last.read_bytes()[:100])
    sink = opened(kind, tmp_path / "lake", log)
    with pytest.raises(TailraceError) as caught:
        write_alone(sink, log, start, end)
    assert caught.value.kind is Kind.SINK_WRITE_FAILED
    sink.close()
    last.unlink()
    sink = opened(kind, tmp_path / "lake", log)
    write_alone(sink, log, start, end)
    delta = DeltaTable(str(tmp_path / "lake" / "public.accounts"))
    assert sorted(delta.to_pyarrow_dataset().to_table(columns=["id"])["id"].to_pylist()) == [1, 2]


@pytest.mark.follows("sink_damaged")
@pytest.mark.parametrize("lost", ["a merged file", "the commit before it"])
def test_commits_of_which_a_loss_of_power_took_a_part_are_found_and_written_again(
    lost, tmp_path, log, monkeypatch
):
    start = log.commit(ACCOUNTS, insert(1, 1, "one", 1))
    wider = relation(1, "public.accounts", COLUMNS | {"more": INT4})
    middle = log.commit(wider, update(1, 1, "two", 2, 20))
    end = log.commit(update(1, 1, UNCHANGED, 3, 30))
    sink = opened("mirror", tmp_path / "lake", log)
    write_alone(sink, log, 0, start)

    commit_without_sync(sink, log, start, middle, monkeypatch)
    table = tmp_path / "lake" / "public.accounts"
    delta = DeltaTable(str(table))
    (merged,) = [Path(uri.removeprefix("file://")) for uri in delta.file_uris()]
    first = delta.version() if lost == "a merged file" else delta.version() - 1
    cut = merged if lost == "a merged file" else table / "_delta_log" / f"{first:020d}.json"
    cut.write_bytes(b"")
    sink = opened("mirror", tmp_path / "lake", log)
    with pytest.raises(TailraceError) as caught:
        write_alone(sink, log, start, end)
    assert caught.value.kind is Kind.SINK_DAMAGED
    assert f"of version {first} and of later ones" in caught.value.hint
    sink.close()
    for version in range(first, delta.version() + 1):
        (table / "_delta_log" / f"{version:020d}.json").unlink()
    sink = opened("mirror", tmp_path / "lake", log)
    write_alone(sink, log, start, end)
    assert mirror_rows(table) == [{"id": 1, "note": "two", "n": 3, "more": 30}]


@pytest.mark.parametrize(
    ("before", "after", "first"),
    [
        ({"id": INT8, "c": INT4}, {"id": INT8, "c": TEXT}, ("3", "x")),
        ({"id": INT8, "c": INT4}, {"id": INT8}, ("3",)),
        ({"id": INT8, "c": (TIMESTAMP, 3)}, {"id": INT8, "c": (TIMESTAMP, 6)}, ("3", "2020-01-01 00:00:00")),
    ],
    ids=["another type", "a dropped column", "a type that values stay under"],
)
def test_after_a_crash_between_columns_and_rows_a_shorter_range_is_extended_to_the_columns(
    before, after, first, tmp_path, log, monkeypatch
):
    def failing(_work):
        raise failpoints.FailpointError("between the two commits")

    at = "2020-01-01 00:00:00.123" if before["c"] != INT4 else "5"
    begun = log.commit(relation(1, "public.t", before), insert(1, 1, at), insert(1, 2, at))
    middle = log.commit(update(1, 1, None))
    reached = log.commit(relation(1, "public.t", after), insert(1, *first))
    end = log.commit(delete(1, 3, *first[1:]), insert(1, *first))
    sink = opened("mirror", tmp_path / "lake", log)
    write_alone(sink, log, 0, begun)
    with monkeypatch.context() as patched:
        patched.setattr(mirror, "merge_small", failing)
        with pytest.raises(TailraceError):
            write_alone(sink, log, begun, end)
    sink.close()
    sink = opened("mirror", tmp_path / "lake", log)
    assert sink.reach("0") > middle
    write_alone(sink, log, begun, middle)
    assert sink.position("0") == reached  # no further than necessary
    once = opened("mirror", tmp_path / "once", log)
    write_alone(once, log, 0, reached)
    assert mirror_rows(tmp_path / "lake" / "public.t") == mirror_rows(tmp_path / "once" / "public.t")
    write_alone(sink, log, middle, end)
    assert [row["id"] for row in mirror_rows(tmp_path / "lake" / "public.t")] == [1, 2, 3]


KILLED = """
import sys
from pathlib import Path
from tests.support.sinks.rig import opened, write
from tests.support.spark.wire import source
from tailrace.changelog.directory import LogDirectory

class Log:
    def __init__(self, path):
        self.path, self.directory = path, LogDirectory.open(path)

kind, lake, log, start, end = sys.argv[1:]
sink = opened(kind, Path(lake), Log(Path(log)))
write(sink, Log(Path(log)), int(start), int(end))
"""


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["parquet", "append", "mirror"])
@pytest.mark.parametrize("point", ["sink.before_commit", "sink.after_commit", "sink.before_position"])
def test_after_a_process_was_killed_the_next_one_completes_the_target(kind, point, tmp_path, log):
    story = live(log, 3, 8)
    ends = [end for end, _ in story]
    command = [
        *(sys.executable, "-m", "tests.support.script", KILLED),
        *(kind, str(tmp_path / "lake"), str(log.path), "0", str(ends[4])),
    ]
    tests = str(Path(__file__).resolve().parents[2])
    environment = {"PYTHONPATH": tests, "TAILRACE_FAILPOINTS": f"{point}=kill", "PATH": ""}
    died = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert died.returncode == -9, died.stderr
    sink = opened(kind, tmp_path / "lake", log)
    write(sink, log, sink.position("0") or 0, ends[5])
    write(sink, log, ends[5], ends[7])
    if kind == "mirror":
        assert table(tmp_path / "lake") == story[7][1]
    else:
        from tests.support.sinks.rig import offsets

        found = offsets(kind, tmp_path / "lake" / "public.accounts")
        whole = opened("parquet", tmp_path / "whole", log)
        write(whole, log, 0, ends[7])
        assert found == offsets("parquet", tmp_path / "whole" / "public.accounts")
