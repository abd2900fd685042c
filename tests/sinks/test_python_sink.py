"""The sink `python`: the user's function gets each change at least once, in order."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from tailrace.changelog import runs
from tailrace.changelog.reader import LogReader
from tailrace.changelog.retention.policy import RetentionRules
from tailrace.changelog.retention.prune import apply
from tailrace.changelog.retention.readers import Readers
from tailrace.config import EngineConfig
from tailrace.config.sections import PythonSinkConfig as PythonConfig
from tailrace.config.source.postgres import PostgresSource
from tailrace.converters.contract import Converter
from tailrace.engine.contracts import StopEngine
from tailrace.engine.processing import ordered_executor
from tailrace.errors import Kind, TailraceError
from tailrace.model import LogRange
from tailrace.pipeline.sink_worker import SinkWorker
from tailrace.pipeline.spark_host import SparkHost
from tailrace.pipeline.status.views import SinkState
from tailrace.ranges import changes as changes_module
from tailrace.ranges import plan
from tailrace.sinks import python
from tailrace.sinks.build import build, recorded_position
from tests.support.orders_log import LogOfOrders

HERE = Path(__file__).parent


@pytest.fixture
def called():
    """An empty module for the user's functions."""
    import sys

    if str(HERE) not in sys.path:
        sys.path.append(str(HERE))
    import handlers_of_tests  # type: ignore[import-not-found]

    handlers_of_tests.seen.clear()
    handlers_of_tests.faults = {}
    return handlers_of_tests


@pytest.fixture
def log(tmp_path):
    found = LogOfOrders(tmp_path / "log")
    yield found
    found.close()


def config_of(function: str, **more) -> PythonConfig:
    return PythonConfig.model_validate(
        {
            "type": "python", "name": "mine", "handler": f"handlers_of_tests:{function}",
            "python_path": str(HERE), "retry_attempts_max": 2, **more,
        }
    )  # fmt: skip


def fed(config: PythonConfig, log: LogOfOrders, upto: int) -> SinkWorker:
    path = log.directory.path
    feed = SinkWorker(
        config,
        "shop",
        path,
        lambda: build(config, PostgresSource(), path),
        SparkHost(None),  # type: ignore[arg-type]
    )
    feed.finish_at(upto)
    feed.run()
    return feed


def test_batches_are_ordered_and_a_new_sink_continues_at_the_recorded_position(
    log, called, monkeypatch
) -> None:
    monkeypatch.setattr(changes_module, "DECODED_BYTES_MAX", 1)
    log.insert(1, 2, 3)
    end = log.insert(4, 5)
    config = config_of("batch", batch_rows_max=2)
    feed = fed(config, log, end)
    assert [len(batch) for batch in called.seen] == [2, 1, 2]
    assert [number for batch in called.seen for _, number, _ in batch] == [1, 2, 3, 4, 5]
    offsets = [offset for batch in called.seen for *_, offset in batch]
    assert offsets == sorted(set(offsets))
    assert (feed.view.rows, feed.view.position) == (5, end)
    assert recorded_position(config, "shop", log.directory, "0") == end
    called.seen.clear()
    end = log.insert(6)
    fed(config, log, end)
    assert [number for batch in called.seen for _, number, _ in batch] == [6]


def test_only_the_failed_record_is_delivered_again(log, called) -> None:
    end = log.insert(1, 2, 3, 4)
    called.faults[3] = ValueError("for once")
    feed = fed(config_of("record", batch=False), log, end)
    assert called.seen == [1, 2, 3, 4]
    assert feed.view.state is SinkState.STOPPED


def test_a_function_that_always_fails_stops_the_sink_at_its_position(log, called) -> None:
    end = log.insert(1, 2, 3)

    class Always(dict):
        def pop(self, key, *_):
            return self[key]

    called.faults = Always({2: ValueError("row contents")})
    config = config_of("record", batch=False, retry_attempts_max=1)
    with pytest.raises(TailraceError) as raised:
        fed(config, log, end)
    assert raised.value.kind is Kind.SINK_WRITE_FAILED
    assert "row contents" not in str(raised.value)
    assert called.seen == [1]
    called.faults = {}
    fed(config, log, end)
    assert called.seen == [1, 2, 3]


def test_the_position_within_a_transaction_never_goes_back(log, called, monkeypatch) -> None:
    monkeypatch.setattr(changes_module, "DECODED_BYTES_MAX", 1)  # each block is decoded alone
    monkeypatch.setattr(runs, "RUN_BYTES_MAX", 1)
    end = log.insert_in_blocks((1, 2), (3, 4), (5, 6))

    class Always(dict):
        def pop(self, key, *_):
            return self[key]

    called.faults = Always({6: ValueError("always")})
    path = log.directory.path
    Readers(log.directory).register("mine", {"0": 0})
    sink = build(config_of("record", batch=False), PostgresSource(), path)
    sink.open(log.directory.identity, "shop")
    with LogReader.open(path, "0") as reader:
        splits = plan.input_splits("0", reader.blocks(0, end), 0, end)
    places = []
    for _ in range(4):
        with pytest.raises(TailraceError):
            sink.write(None, path, LogRange("0", 0, end), splits)
        places.append(Readers(log.directory).get("mine").kept["0"]["log_offset"])
    sink.close()
    assert len(set(places)) == 1
    assert called.seen == [1, 2, 3, 4, 5]


def test_the_position_is_recorded_while_the_records_of_a_batch_are_delivered(
    log, called, monkeypatch
) -> None:
    monkeypatch.setattr(python, "KEEP_INTERVAL_S", 0)
    monkeypatch.setattr(ordered_executor, "SETTLE_S", 0)
    end, kept = log.insert(1, 2, 3), []

    def record(one) -> None:
        reader = Readers(log.directory).get("mine")
        kept.append((reader.kept.get("0", {}).get("log_offset", 0) if reader else 0) > called.seen[-1])
        called.seen.append(one.source["log_offset"])

    monkeypatch.setattr(called, "record", record)
    called.seen.append(0)
    fed(config_of("record", batch=False), log, end)
    assert kept == [False, True, True]


def test_a_function_cannot_stop_the_pipeline(log, called) -> None:
    end = log.insert(1)
    called.faults["batch"] = StopEngine()
    with pytest.raises(TailraceError) as raised:
        fed(config_of("batch"), log, end)
    assert raised.value.kind is Kind.TASK_FAILED


def test_a_function_gets_converted_records_of_the_chosen_tables(log, called, monkeypatch) -> None:
    end = log.insert(1)
    from tailrace import extensions
    from tailrace.converters.debezium import JsonConverter

    monkeypatch.setattr(extensions, "factory", lambda *_: JsonConverter)
    assert isinstance(JsonConverter(), Converter)
    converter = {"type": "json", "schemas_enable": False}
    fed(config_of("event", batch=False, converter=converter), log, end)
    ((topic, key, value),) = called.seen
    assert (topic, json.loads(key), json.loads(value)["after"]) == (
        "public.orders", {"id": 1}, {"id": 1, "what": "thing"},
    )  # fmt: skip
    called.seen.clear()
    assert fed(config_of("record", name="other", tables=["public.lines"]), log, end).view.position == end
    assert called.seen == []


def test_an_async_function_runs_on_one_loop_range_after_range(log, called) -> None:
    ends = [0, log.insert(1), log.insert(2)]
    path = log.directory.path
    Readers(log.directory).register("mine", {"0": 0})
    sink = build(config_of("on_a_loop"), PostgresSource(), path)
    sink.open(log.directory.identity, "shop")
    with LogReader.open(path, "0") as reader:
        for begin, end in itertools.pairwise(ends):
            splits = plan.input_splits("0", reader.blocks(begin, end), begin, end)
            sink.write(None, path, LogRange("0", begin, end), splits)
    assert len(called.seen) == 2
    assert len(set(called.seen)) == 1
    assert called.seen[0].is_running()
    sink.close()


def test_a_function_that_marks_records_itself_is_refused(log, called) -> None:
    with pytest.raises(TailraceError, match="it is `manual`") as raised:
        fed(config_of("by_itself"), log, log.insert(1))
    assert raised.value.kind is Kind.CONFIG_INVALID


def test_two_processes_cannot_run_one_sink(log, called) -> None:
    log.insert(1)
    path = log.directory.path
    first, second = (build(config_of("batch"), PostgresSource(), path) for _ in range(2))
    first.open(log.directory.identity, "shop")
    with pytest.raises(TailraceError) as raised:
        second.open(log.directory.identity, "shop")
    assert raised.value.kind is Kind.SINK_LOCKED
    first.close()
    second.open(log.directory.identity, "shop")
    second.close()
    assert [reader.name for reader in Readers(log.directory).all()] == []


def test_retention_leaves_its_place_alone_while_it_is_stopped(log, called) -> None:
    end, config = log.insert(1), config_of("batch")
    fed(config, log, end)
    apply(log.directory, "0", RetentionRules(size_bytes=0))
    assert recorded_position(config, "shop", log.directory, "0") == end


@pytest.mark.parametrize(
    "handler",
    [
        "handlers_of_tests:missing",
        "handlers_of_tests:nothing",
        "handlers_of_tests:with_committer",
        "no_such:thing",
    ],
)
def test_a_function_that_is_missing_or_takes_other_arguments_is_refused(log, called, handler) -> None:
    config = config_of("batch").model_copy(update={"handler": handler})
    with pytest.raises(TailraceError) as raised:
        build(config, PostgresSource(), log.directory.path).open(log.directory.identity, "shop")
    assert raised.value.kind is Kind.CONFIG_INVALID
    assert handler in raised.value.message


def test_a_pipeline_file_names_a_function_by_module_and_name(tmp_path) -> None:
    sink = {"type": "python", "handler": "shop.changes:take"}
    document = {"name": "shop", "source": {"host": "h"}, "log": {"path": "l"}, "sinks": [sink]}
    config = EngineConfig.model_validate(document, context={"base": tmp_path})
    assert (config.sinks[0].name, config.sinks[0].python_path) == ("python-take", tmp_path)
    for wrong in ("take", "shop:", "a b:take", "shop.changes.take"):
        document["sinks"] = [{**sink, "handler": wrong}]
        with pytest.raises(ValidationError, match="module:function"):
            EngineConfig.model_validate(document)
