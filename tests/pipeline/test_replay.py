"""Replay over a real log, with an in-memory sink that keeps the promises of the JSON Lines sink."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from tailrace.changelog.retention.policy import RetentionRules
from tailrace.changelog.retention.prune import apply
from tailrace.changelog.retention.readers import Readers
from tailrace.config import ColumnPolicy, EngineConfig, PipelineConfig
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline import replay as replay_module
from tailrace.pipeline.log.schemas import versions
from tailrace.pipeline.replay import Replay, choose_sink
from tailrace.ranges.positions import parse_point
from tailrace.sinks.contract import SinkCommit
from tests.support.forked import PROCESSES
from tests.support.orders_log import LogOfOrders
from tests.support.pipeline.staged import FakeSpark


class MemorySink:
    type = "jsonl"

    def __init__(self, config, targets):
        self.name, self.spans = config.name, targets.setdefault(str(config.path), [])
        self.folder = config.path.name

    def open(self, log, pipeline):
        pass

    def position(self, task):
        return self.spans[-1].end if self.spans else None

    reach = position

    def write(self, spark, log, span, splits):
        self.spans.append(span)
        return SinkCommit(span, rows=sum(split.rows for split in splits))

    def close(self):
        pass


@pytest.fixture
def targets(monkeypatch):
    """The spans that each target directory got."""
    made = {}
    FakeSpark.asked = 0
    monkeypatch.setattr(replay_module, "SparkHost", FakeSpark)
    monkeypatch.setattr(replay_module, "require_java", lambda: 17)
    monkeypatch.setattr(replay_module, "build", lambda config, *_: MemorySink(config, made))
    return made


def pipeline_on(tmp_path, kind="jsonl", **settings):
    sinks = [{"type": kind, "path": str(tmp_path / "out"), "name": "out", **settings}]
    return PipelineConfig.model_validate(
        {
            "name": "shop",
            "source": {"host": "localhost"},
            "log": {"path": str(tmp_path / "log")},
            "sinks": sinks,
        }
    )


@pytest.fixture
def orders(tmp_path):
    log = LogOfOrders(tmp_path / "log")
    yield log
    log.close()


def replayed(pipeline, **options):
    replay = Replay(pipeline, choose_sink(pipeline, "0"), **options)
    replay.run()
    return replay.summary()


def test_an_empty_target_gets_the_whole_log(orders, targets, tmp_path):
    orders.insert(1, 2)
    end = orders.insert(3)
    told = replayed(pipeline_on(tmp_path))
    assert [(span.start, span.end) for span in targets[str(tmp_path / "out")]] == [(0, end)]
    assert told == f"sink out: 3 rows written, now at {end}"


def test_an_intact_target_is_not_changed_and_spark_is_not_started(orders, targets, tmp_path):
    orders.insert(1)
    pipeline = pipeline_on(tmp_path)
    replayed(pipeline)
    FakeSpark.asked = 0
    assert "already holds everything" in replayed(pipeline)
    assert "already holds everything" in replayed(pipeline, begin=parse_point("0"))
    assert len(targets[str(tmp_path / "out")]) == 1
    assert FakeSpark.asked == 0


def test_a_replay_that_was_stopped_does_not_claim_that_the_sink_is_complete(
    orders, targets, tmp_path, monkeypatch
):
    def refuse(*_):
        raise TailraceError(Kind.SINK_WRITE_FAILED, "write: the disk is full")

    end = orders.insert(1)
    pipeline = pipeline_on(tmp_path)
    monkeypatch.setattr(MemorySink, "write", refuse)
    replay = Replay(pipeline, choose_sink(pipeline, "0"))
    replay.stop()
    replay.run()
    assert (
        replay.summary()
        == f"sink out: stopped, 0 rows written, 0 of {end} reached; the same command continues."
    )


def test_a_replay_does_not_wait_for_room_on_the_logs_disk(orders, targets, tmp_path, monkeypatch):
    tried = []

    def refuse(*_):
        tried.append("")
        raise TailraceError(Kind.LOG_FULL, "write out.json: No space left on device")

    orders.insert(1)
    monkeypatch.setattr(Readers, "begin", refuse)
    with pytest.raises(TailraceError) as caught:
        replayed(pipeline_on(tmp_path))
    assert (caught.value.kind, len(tried)) == (Kind.LOG_FULL, 1)


def test_a_copy_leaves_no_reader_registered(orders, targets, tmp_path):
    end = orders.insert(1)
    replayed(pipeline_on(tmp_path), into=tmp_path / "copy")
    assert [span.end for span in targets[str(tmp_path / "copy")]] == [end]
    assert str(tmp_path / "out") not in targets
    assert Readers(orders.directory).all() == []


def test_a_copy_removes_no_reader_of_another_sink(orders, targets, tmp_path):
    orders.insert(1)
    readers = Readers(orders.directory)
    readers.register("out-replay", {"0": 0})
    replayed(pipeline_on(tmp_path), into=tmp_path / "copy")
    assert [(reader.name, reader.offsets) for reader in readers.all()] == [("out-replay", {"0": 0})]


def test_each_of_several_simultaneous_copies_holds_the_log(orders, targets, tmp_path, monkeypatch):
    end = orders.insert(1)
    readers, pipeline = Readers(orders.directory), pipeline_on(tmp_path)
    written, may_go_on = threading.Semaphore(0), {name: threading.Event() for name in ("a", "b")}
    write = MemorySink.write

    def write_and_wait(sink, *arguments):
        commit = write(sink, *arguments)
        written.release()
        assert may_go_on[sink.folder].wait(30)
        return commit

    monkeypatch.setattr(MemorySink, "write", write_and_wait)
    copies = {}
    for name in may_go_on:
        replay = Replay(pipeline, choose_sink(pipeline, "0"), into=tmp_path / name)
        copies[name] = threading.Thread(target=replay.run)
        copies[name].start()
    assert written.acquire(timeout=30)
    assert written.acquire(timeout=30)
    assert [reader.offsets for reader in readers.all()] == [{"0": 0}, {"0": 0}]
    for left, (name, copy) in zip((1, 0), copies.items(), strict=True):
        may_go_on[name].set()
        copy.join(30)
        assert [reader.offsets for reader in readers.all()] == [{"0": 0}] * left
    assert [targets[str(tmp_path / name)][-1].end for name in copies] == [end, end]
    assert list((orders.directory.path / "readers").iterdir()) == []


def register_and_die(directory):
    with Readers(directory).temporary("replay:out") as name:
        Readers(directory).register(name, {"0": 0})
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_copy_that_was_killed_holds_nothing_back(orders):
    orders.insert(1)
    readers = Readers(orders.directory)
    with readers.temporary("replay:out") as alive:
        readers.register(alive, {"0": 0})
        process = PROCESSES.Process(target=register_and_die, args=(orders.directory,))
        process.start()
        process.join(30)
        assert len(readers.all()) == 2
        apply(orders.directory, "0", RetentionRules(size_bytes=0))
        assert [reader.name for reader in readers.all()] == [alive]
    assert list((orders.directory.path / "readers").iterdir()) == []


def test_a_copy_that_an_earlier_version_left_behind_holds_nothing_back(orders):
    orders.insert(1)
    readers = Readers(orders.directory)
    readers.register("replay:out:0123abcd", {"0": 0})
    folder = orders.directory.path / "readers"
    (folder / ".replay%3Aout%3A0123abcd.lock").touch()
    (folder / ".out.lock").touch()  # of a sink `python`
    readers.remove_ended()
    assert [path.name for path in folder.iterdir()] == [".out.lock"]


@pytest.mark.skipif(os.geteuid() != 0, reason="is root")
def test_root_leaves_no_files_in_the_target_of_another_users_pipeline(orders, targets, tmp_path):
    end = orders.insert(1)
    os.chown(orders.directory.path / "identity.json", 65534, 65534)
    with pytest.raises(TailraceError, match="its files would be root's") as caught:
        replayed(pipeline_on(tmp_path))
    assert caught.value.kind is Kind.ENVIRONMENT_UNFIT
    assert targets == {}
    replayed(pipeline_on(tmp_path), into=tmp_path / "copy")
    assert [span.end for span in targets[str(tmp_path / "copy")]] == [end]


def test_a_copy_in_the_directory_of_the_log_or_a_sink_is_refused(orders, targets, tmp_path):
    orders.insert(1)
    for place in (tmp_path / "log", tmp_path / "out", tmp_path / "out" / "within", tmp_path):
        with pytest.raises(TailraceError, match="overlaps the directory of") as caught:
            replayed(pipeline_on(tmp_path), into=place)
        assert caught.value.kind is Kind.CONFIG_INVALID
    assert targets == {}


def test_an_empty_target_may_begin_later(orders, targets, tmp_path):
    first = orders.insert(1)
    end = orders.insert(2)
    replayed(pipeline_on(tmp_path), begin=parse_point("0/7D0"))
    assert [(span.start, span.end) for span in targets[str(tmp_path / "out")]] == [(first, end)]


def test_an_empty_target_that_begins_at_the_logs_end_is_not_said_to_hold_everything(
    orders, targets, tmp_path
):
    end = orders.insert(1)
    assert f"has nothing from {end} on" in replayed(pipeline_on(tmp_path), begin=parse_point(str(end)))


def test_a_mirror_can_not_begin_later(orders, targets, tmp_path):
    orders.insert(1)
    with pytest.raises(TailraceError) as caught:
        replayed(pipeline_on(tmp_path, "delta", mode="mirror"), begin=parse_point("0"))
    assert caught.value.kind is Kind.CONFIG_INVALID


@pytest.mark.parametrize(
    ("kind", "settings", "way_out"), [("jsonl", {}, True), ("delta", {"mode": "mirror"}, False)]
)
def test_a_replay_of_a_range_that_retention_removed_is_refused(tmp_path, targets, kind, settings, way_out):
    log = LogOfOrders(tmp_path / "log", segment_bytes=1 << 16)
    while len(log.directory.segments("0")) < 3:
        log.insert(*range(500))
    log.insert(1)
    apply(log.directory, "0", RetentionRules(size_bytes=1))
    with pytest.raises(TailraceError) as caught:
        replayed(pipeline_on(tmp_path, kind, **settings))
    assert caught.value.kind is Kind.LOG_RANGE_GONE
    assert ("--from" in caught.value.hint) is way_out
    log.close()


def test_the_hint_names_the_source_among_several(tmp_path, targets):
    config = EngineConfig.model_validate(
        {
            "name": "shop",
            "sources": [{"name": name, "host": "localhost"} for name in ("eu", "us")],
            "log": {"path": str(tmp_path / "log")},
            "sinks": [{"type": "jsonl", "path": str(tmp_path / "out"), "name": "out"}],
        }
    )
    log = LogOfOrders(tmp_path / "log" / "eu", segment_bytes=1 << 16)
    while len(log.directory.segments("0")) < 3:
        log.insert(*range(500))
    apply(log.directory, "0", RetentionRules(size_bytes=1))
    with pytest.raises(TailraceError) as caught:
        replayed(config.pipeline("eu"))
    assert "`tailrace replay FILE --source eu --sink out --from " in caught.value.hint
    log.close()


def test_without_a_log_there_is_nothing_to_replay(tmp_path, targets):
    with pytest.raises(TailraceError) as caught:
        replayed(pipeline_on(tmp_path))
    assert caught.value.kind is Kind.LOG_MISSING


@pytest.mark.parametrize("which", ["1", "other", "-1", ""])
def test_an_unknown_sink_is_refused_with_the_names_of_the_sinks(tmp_path, which):
    with pytest.raises(TailraceError, match="0 or out") as caught:
        choose_sink(pipeline_on(tmp_path), which)
    assert caught.value.kind is Kind.CONFIG_INVALID


def test_a_mask_that_names_no_column_of_the_log_is_refused_before_anything_is_written(
    orders, targets, tmp_path
):
    orders.insert(1)
    pipeline = pipeline_on(tmp_path)

    def masking(column):
        rules = {"masks": [{"columns": [column], "method": "fixed"}]}
        source = pipeline.source.model_copy(update=dict(ColumnPolicy.model_validate(rules)))
        return pipeline.model_copy(update={"source": source})

    (version,) = versions(orders.directory, "0", None, ColumnPolicy())
    name = f"{version.relation.qualified_name}.{version.columns[-1].name}"
    with pytest.raises(TailraceError, match="names no column that the log knows") as caught:
        replayed(masking(f"{name}x"))
    assert caught.value.kind is Kind.CONFIG_INVALID
    assert targets == {}
    replayed(masking(name))
    assert len(targets) == 1
