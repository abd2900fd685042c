"""An engine reads a log: completely, in order, from wherever it stopped."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.changelog.retention.policy import RetentionRules
from tailrace.changelog.retention.prune import apply
from tailrace.changelog.retention.readers import Readers
from tailrace.cli.log_contents import show_schemas
from tailrace.config import ColumnPolicy, PipelineConfig
from tailrace.converters.debezium import JsonConverter
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline.log import consumer as reading_module
from tailrace.pipeline.log.consumer import LogConsumer, partition_of, reader_name
from tailrace.pipeline.log.schemas import versions
from tailrace.pipeline.offsets.log_store import LogOffsetStore
from tailrace.ranges import changes as changes_module
from tailrace.ranges.batches import VALUES_MAX
from tailrace.realtime.handover import Handover
from tailrace.records.events import bytes_of
from tests.support.examples import examples
from tests.support.orders_log import LogOfOrders
from tests.support.sinks.rig import relation
from tests.support.spark.wire import INT8, TEXT, HandmadeLog, insert


def pipeline_at(path, **sections):
    source = {"host": "127.0.0.1", "port": 1}
    return PipelineConfig.model_validate(
        {"name": "shop", "source": source, "log": {"path": str(path)}, **sections}
    )


def drained(reading):
    """Return the ids that are read until nothing is new, each with its offset and transaction end."""
    found = []
    while (batch := reading.next()) is not None:
        assert list(batch.places) == list(range(batch.polled))
        ends = batch.transaction_ends
        found += [
            (record.after["id"], batch.offsets[record.place], bool(ends[record.place])) for record in batch
        ]
    return found


@pytest.fixture
def small(monkeypatch):
    """Batches so small that each transaction of the tests needs several."""
    monkeypatch.setattr(changes_module, "DECODED_BYTES_MAX", 1)


def test_tables_whose_names_differ_only_by_a_dot_have_schemas_of_their_own(tmp_path, capsys):
    with HandmadeLog(tmp_path / "log") as log:
        one, other = relation(1, "a.b.c", {"id": INT8}), relation(2, "a.b.c", {"id": TEXT})
        log.commit(one, insert(1, 1), other.replace(b"a\0b.c\0", b"a.b\0c\0"), insert(2, "x"))
        found = versions(LogDirectory.open(log.path), "0")
        show_schemas(log.path, "0", None, ColumnPolicy(), as_json=False)
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines() if " version " in line]
    assert shown == ['a."b.c"', '"a.b".c']
    assert [(each.relation.schema, each.relation.table, each.changes) for each in found] == [
        ("a", "b.c", ()), ("a.b", "c", ()),
    ]  # fmt: skip


@pytest.fixture
def log(tmp_path):
    found = LogOfOrders(tmp_path / "log")
    yield found
    found.close()


def test_every_change_is_read_once_in_order_while_the_log_grows(log, small):
    reading = LogConsumer("shop", pipeline_at(log.directory.path), None, rows_max=3)
    log.insert(1, 2, 3, 4, 5)
    log.progress()
    first = drained(reading)
    assert [number for number, *_ in first] == [1, 2, 3, 4, 5]
    assert [ends for *_, ends in first] == [False, False, False, False, True]
    assert drained(reading) == []
    end = log.insert(6)
    assert [number for number, *_ in drained(reading)] == [6]
    assert reading.offset["log_offset"] == end


@examples(25)
@given(
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    rows_max=st.integers(1, 5),
    decoded=st.sampled_from([1, 300, 1 << 20]),
    data=st.data(),
)
def test_reading_continues_exactly_after_the_record_of_any_offset(
    tmp_path_factory, sizes, rows_max, decoded, data
):
    log = LogOfOrders(tmp_path_factory.mktemp("any") / "log")
    numbers = iter(range(1000))
    for size in sizes:
        log.insert(*[next(numbers) for _ in range(size)])
    pipeline = pipeline_at(log.directory.path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changes_module, "DECODED_BYTES_MAX", decoded)
        everything = drained(LogConsumer("shop", pipeline, None, rows_max=rows_max))
        assert [number for number, *_ in everything] == list(range(sum(sizes)))
        ends = np.cumsum(sizes) - 1
        assert [k for k, (*_, is_end) in enumerate(everything) if is_end] == list(ends)
        place = data.draw(st.integers(0, len(everything) - 1))
        rest = drained(LogConsumer("shop", pipeline, everything[place][1], rows_max=rows_max))
    assert rest == everything[place + 1 :]
    log.close()


def test_reading_waits_for_capture_while_the_end_mark_is_behind_after_a_loss_of_power(log):
    pipeline = pipeline_at(log.directory.path)
    log.insert(1)
    with log.power_lost():
        log.insert(2)
        reading = LogConsumer("shop", pipeline, None)
        assert [number for number, *_ in drained(reading)] == [1, 2]
    again = LogConsumer("shop", pipeline, reading.offset)
    for _ in range(2):
        assert again.next() is None
    log.open_again()
    log.insert(3)
    assert [number for number, *_ in drained(again)] == [3]


@pytest.mark.follows("log_range_invalid")
def test_a_position_beyond_the_end_mark_after_a_loss_of_power_is_read_once_capture_ran(log):
    log.insert(1)
    with log.power_lost():
        log.insert(2)
        end = log.writer.durable.offset
    with LogReader.open(log.directory, "0") as reader:
        with pytest.raises(TailraceError) as refused:
            reader.blocks(end, end)
        assert "run the pipeline" in refused.value.hint
        log.open_again()
        assert reader.blocks(end, end) == []


def test_a_batch_without_records_advances_the_offset(log):
    reading = LogConsumer("shop", pipeline_at(log.directory.path), None)
    end = log.progress()
    batch = reading.next()
    assert batch is not None
    assert (len(batch), batch.polled, batch.end_offset["log_offset"]) == (0, 0, end)


def test_segments_without_records_are_passed_also_in_real_time(tmp_path):
    """Otherwise retention would keep them for an engine that has everything, or drop the engine."""
    log = LogOfOrders(tmp_path / "log", segment_bytes=1 << 12)
    reading = LogConsumer("shop", pipeline_at(log.directory.path, realtime={"enabled": True}), None)
    handover = Handover([reading.realtime.buffer], lambda: None)
    reading.realtime.attach(handover)
    log.give_to(handover)
    for number in range(3):
        log.insert(number)
        assert [given for given, *_ in drained(reading)] == [number]
        assert reading.realtime.works
        begin = log.roll()
        assert reading.offset is not None
        reading.note(reading.offset)
        reading.keep()
        assert drained(reading) == []
        assert reading.offset["log_offset"] >= begin
    log.close()


def test_after_an_error_nothing_is_lost_or_repeated(log, small, monkeypatch):
    log.insert(1, 2)
    log.insert(3)
    reading = LogConsumer("shop", pipeline_at(log.directory.path), None, rows_max=3)
    given_out = [record.after["id"] for record in reading.next()]
    batches = vars(reading_module)["decoded_batches"]

    def fails(*_):
        raise TailraceError(Kind.LOG_FULL, "for once")
        yield

    monkeypatch.setattr(reading_module, "decoded_batches", fails)
    log.insert(4)
    raised = []
    while not raised:
        try:
            given_out += [record.after["id"] for record in reading.next()]
        except TailraceError as error:
            raised.append(error.kind)
    assert raised == [Kind.LOG_FULL]
    monkeypatch.setattr(reading_module, "decoded_batches", batches)
    given_out += [number for number, *_ in drained(reading)]
    assert given_out == [1, 2, 3, 4]


def test_the_log_stores_offsets_and_its_readers_position_moves_by_whole_transactions(tmp_path, small):
    log = LogOfOrders(tmp_path / "log", segment_bytes=1 << 16)
    pipeline = pipeline_at(log.directory.path)
    store = LogOffsetStore("shop", [pipeline])
    partition = partition_of(pipeline)
    assert store.read([partition]) == {}
    boundary = log.insert(1, 2)
    log.insert(3, 4, 5)
    reading = LogConsumer("shop", pipeline, None, rows_max=3)
    given_out = drained(reading)
    inside = given_out[3][1]
    store.write([(partition, inside)], 5)
    assert store.read([{"other": "one"}, partition]) == {1: inside}
    reader = Readers(log.directory).get(reader_name("shop"))
    assert reader.offsets == {"0": boundary}
    reading.note(inside)
    reading.keep()
    again = LogConsumer("shop", pipeline, store.read([partition])[0], rows_max=3)
    assert [number for number, *_ in drained(again)] == [5]
    store.stop()
    log.close()


def test_retention_waits_for_an_engine_and_a_dropped_engine_gets_an_error(tmp_path):
    log = LogOfOrders(tmp_path / "log", segment_bytes=1 << 16)
    reading = LogConsumer("shop", pipeline_at(log.directory.path), None)
    log.insert(0)
    first = reading.next()
    for number in range(60):
        log.insert(*range(number * 100, number * 100 + 100))
    rules = RetentionRules(size_bytes=1, age_s=None, on_slow_reader="hold")
    assert apply(log.directory, "0", rules).held_by == (reader_name("shop"),)
    rules = RetentionRules(size_bytes=1, age_s=None, on_slow_reader="drop")
    assert apply(log.directory, "0", rules).dropped_readers == (reader_name("shop"),)
    with pytest.raises(TailraceError) as raised:
        LogConsumer("shop", pipeline_at(log.directory.path), first.end_offset).open()
    assert raised.value.kind is Kind.LOG_RANGE_GONE
    reading.note(first.end_offset or {})
    with pytest.raises(TailraceError) as raised:
        reading.keep()
    assert raised.value.kind is Kind.LOG_RANGE_GONE
    log.close()


def test_offsets_of_another_log_and_of_none_are_refused(log, tmp_path):
    end = log.insert(1)
    pipeline = pipeline_at(log.directory.path)
    own = {"log": log.directory.identity.log_id}
    for begin, where in (
        ({"log": "0" * 32, "log_offset": 0}, pipeline),
        ({**own, "log_offset": end + 1}, pipeline),
        ({**own, "log_offset": "x"}, pipeline),
        ({**own, "log_offset": 0}, pipeline_at(tmp_path / "nothing")),
    ):
        with pytest.raises(TailraceError) as raised:
            LogConsumer("shop", where, begin).open()
        assert raised.value.kind is Kind.OFFSETS_FOREIGN


def test_after_offsets_were_set_back_changes_are_read_again(log):
    pipeline = pipeline_at(log.directory.path)
    log.insert(1)
    log.insert(2)
    reading = LogConsumer("shop", pipeline, None)
    given_out = drained(reading)
    reading.note(given_out[-1][1])
    reading.keep()
    assert [number for number, *_ in drained(LogConsumer("shop", pipeline, given_out[0][1]))] == [2]
    readers = Readers(log.directory)
    assert readers.get(reader_name("shop")).offsets["0"] < given_out[-1][1]["log_offset"]


@pytest.mark.slow
def test_a_table_with_many_columns_comes_in_batches_of_fewer_records(tmp_path):
    columns, rows = 1590, 600
    with HandmadeLog(tmp_path / "log") as log:
        shape = relation(1, "public.wide", {"id": INT8, **{f"c{n}": INT8 for n in range(columns - 1)}})
        log.commit(shape, *[insert(1, number, *[None] * (columns - 1)) for number in range(rows)])
    reading = LogConsumer("shop", pipeline_at(tmp_path / "log"), None)
    given_out, made = [], JsonConverter(schemas_enable=True)
    while (batch := reading.next()) is not None:
        assert len(batch) * columns <= VALUES_MAX
        assert sum(bytes_of(made.convert(group)) for group in batch.groups) < 128 << 20
        given_out += [record.after["id"] for record in batch]
    assert given_out == list(range(rows))
