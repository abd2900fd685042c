"""The behaviours in Debezium's AsyncEmbeddedEngineTest and EmbeddedEngineTest, tested with this engine.

Above each test are the names of theirs. Where ours differs, the comment says how and why. There is
no counterpart of testDefaultBuilderFactory, as there are no builders, only `tailrace.Engine`.
RetryingCallableTest is in test_retrying.py.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time

import pyarrow as pa
import pyarrow.compute as pc
import pytest
import structlog

from tailrace.converters.debezium import JsonConverter
from tailrace.engine.contracts import RetriableError, StopEngine
from tailrace.engine.lifecycle import State
from tailrace.engine.processing import manual
from tailrace.errors import Kind, TailraceError
from tailrace.records.events import Converted
from tailrace.testing import Fault, LinesSource, MovableClock
from tests.support.engines import Heard, Seen, Store, engine_of
from tests.support.wait import wait_until

FAR_S = 60.0


def numbers(first, last):
    return list(range(first, last + 1))


class Step:
    """A transformation that calls a function with a group."""

    def __init__(self, apply):
        self.apply = apply
        self.closed = 0

    def close(self):
        self.closed += 1


def without(*dropped):
    """Return a transformation that drops lines."""

    def apply(group):
        line = pc.struct_field(group.column("after"), "number")
        keep = pc.invert(pc.is_in(line, pa.array(dropped, pa.int64())))
        yield group.take(pc.indices_nonzero(keep).to_numpy().astype("int64"))

    return Step(apply)


class Texts:
    """A converter: keys are texts, values bytes."""

    def convert(self, group):
        line = pc.struct_field(group.column("after"), "line")
        keys = pc.struct_field(group.column("key"), "number").cast(pa.string())
        return Converted(keys, line.cast(pa.binary()), None)

    def close(self):
        pass


# testEngineBasicLifecycle
def test_lines_come_as_they_are_appended_until_the_engine_is_closed():
    source, seen = LinesSource(10, ends=False), Seen()
    engine = engine_of(source, on_batch=seen.batch)
    assert engine.state is State.CREATING
    engine.start()
    assert engine.state is State.POLLING_TASKS
    wait_until(lambda: seen.count == 10, FAR_S)
    for more in range(1, 6):
        source.append(10)
        wait_until(lambda more=more: seen.count == 10 + 10 * more, FAR_S)
    engine.close()
    assert engine.state is State.STOPPED
    assert seen.lines == {"0-0": numbers(1, 60)}


# testRunMultipleTasks
def test_all_tasks_run_each_in_its_order():
    source, seen = LinesSource(100, tasks=5), Seen()
    engine_of(source, on_batch=seen.batch).run()
    assert seen.lines == {f"{task}-0": numbers(1, 100) for task in range(5)}


# testTaskConfigurationIsLoggedWithMaskedPasswords
def test_configurations_of_tasks_are_logged_without_passwords():
    class Secretive(LinesSource):
        def task_settings(self, tasks_max):
            (own,) = super().task_settings(tasks_max)
            inner = {"database.password": "canary-1", "dsn": "postgresql://me:canary-2@db/x"}
            return [{**own, **inner, "list": [{"api_key": "canary-3"}], "password": "${env:PW}"}]

    with structlog.testing.capture_logs() as logs:
        engine_of(Secretive(), Seen().record).run()
    (entry,) = [entry for entry in logs if entry["event"] == "task configuration"]
    assert entry["task"] == 0
    assert entry["settings"]["dsn"] == "postgresql://me:***@db/x"
    assert entry["settings"]["password"] == "${env:PW}"
    assert "canary" not in str(logs)


# testTasksAreStoppedIfSomeFailsToStart
def test_tasks_are_stopped_if_some_fail_to_start():
    faults = [Fault("start", task=task, error=ValueError("no"), delay_s=0.05 * task) for task in (1, 4, 7)]
    source, seen = LinesSource(10, tasks=10, faults=faults), Seen()
    engine = engine_of(source, seen.record)
    with pytest.raises(TailraceError) as caught:
        engine.run()
    assert caught.value.kind is Kind.TASK_FAILED
    assert caught.value.context["task"] in {1, 4, 7}
    assert isinstance(caught.value.__cause__, ValueError)
    assert engine.state is State.STOPPED
    assert not source.open
    assert [source.count("stop", task) for task in range(10)] == [1] * 10
    assert not seen.count


# testCompletionCallbackCalledUponSuccess
def test_the_completion_callback_gets_success_once():
    source, seen, heard = LinesSource(20, ends=False), Seen(), Heard()
    engine = engine_of(source, seen.record, callbacks=heard.callbacks())
    engine.start()
    wait_until(lambda: seen.count == 20, FAR_S)
    engine.close()
    assert heard.completed == (True, "engine 'engine' completed normally", None)
    assert heard.events.count("completed") == 1


# testCompletionCallbackCalledUponFailure, interruptedTaskShutsDown: the error is ours and names the task; its
# cause is what the task raised.
@pytest.mark.parametrize("error", [InterruptedError(), KeyboardInterrupt(), SystemExit()])
def test_the_completion_callback_gets_the_failure(error):
    heard = Heard()
    engine = engine_of(
        LinesSource(20, faults=[Fault("poll", 2, error=error)]), Seen().record, callbacks=heard.callbacks()
    )
    with pytest.raises(TailraceError):
        engine.run()
    assert heard.completed is not None
    success, message, told = heard.completed
    assert not success
    assert told is engine.error
    assert told.__cause__ is error
    assert type(error).__name__ in message


# testErrorInConnectorCallbackDoesNotBlockShutdown
def test_callbacks_that_raise_do_not_disturb_the_engine():
    def fail(what):
        raise RuntimeError(what)

    heard, seen = Heard(fail), Seen()
    engine_of(LinesSource(), seen.record, callbacks=heard.callbacks()).run()
    assert seen.count == 10
    assert heard.events[-1] == "completed"


@pytest.mark.slow
def test_callbacks_that_hang_do_not_block_the_engine():
    release = threading.Event()
    heard, seen = Heard(lambda _: release.wait(FAR_S)), Seen()
    try:
        engine = engine_of(LinesSource(), seen.record, callbacks=heard.callbacks())
        engine.run()
        assert engine.state is State.STOPPED
        assert seen.count == 10
        assert heard.events == ["connector_started"]
    finally:
        release.set()


# testCannotStopWhileTasksAreStarting: there close() refuses; ours waits until every start has ended, even
# if one fails, and then stops all tasks. So a program may close an engine at any time.
def test_close_during_the_start_waits_for_every_task_and_stops_all():
    starting, go_on = threading.Event(), threading.Event()

    def hold():
        starting.set()
        assert go_on.wait(FAR_S)

    faults = [Fault("start", task=0, call=hold), Fault("start", task=2, error=ValueError())]
    source, seen = LinesSource(tasks=3, faults=faults), Seen()
    engine = engine_of(source, seen.record)
    failed = []

    def run():
        try:
            engine.run()
        except TailraceError as error:
            failed.append(error)

    running = threading.Thread(target=run)
    running.start()
    assert starting.wait(FAR_S)
    closing = threading.Thread(target=engine.close)
    closing.start()
    wait_until(lambda: "close called" in engine.view().story or failed, FAR_S)
    assert engine.state is State.STARTING_TASKS
    assert closing.is_alive()
    go_on.set()
    closing.join(FAR_S)
    running.join(FAR_S)
    assert engine.state is State.STOPPED
    assert failed
    assert not source.open
    assert [source.count("stop", task) for task in range(3)] == [1, 1, 1]
    assert not seen.count


# testCannotStopAlreadyStoppedEngine
def test_an_engine_that_has_ended_can_be_closed_but_not_started():
    engine = engine_of(LinesSource(), Seen().record)
    engine.run()
    for call in (engine.run, engine.start):
        with pytest.raises(TailraceError, match="it has stopped; its story: CREATING") as caught:
            call()
        assert caught.value.kind is Kind.ENGINE_MISUSED
    engine.close()
    assert engine.view().state is State.STOPPED


# testExecuteSmt, shouldExecuteSmt
def test_transformations_drop_and_route():
    got = []
    options = {
        "predicates": {"first": {"type": "expression", "where": "after.number = 1"}},
        "transformations": [
            {"type": "drop", "predicate": "first"},
            {"type": "route", "regex": "lines(.*)", "replacement": "routed$1"},
        ],
    }
    engine_of(
        LinesSource(), lambda record: got.append((record.topic, record.after["number"])), options=options
    ).run()
    assert got == [("routed.0-0", number) for number in numbers(2, 10)]


# testCloseSmt
def test_transformations_are_closed_once_however_the_engine_ends():
    for faults in ((), [Fault("poll", error=ValueError())], [Fault("start", error=ValueError())]):
        step = without(1)
        engine = engine_of(LinesSource(faults=faults), Seen().record, transformations=[step])
        with contextlib.suppress(TailraceError):
            engine.run()
        assert step.closed == 1


# testPollingIsRetriedUponFailure
def test_a_failed_poll_is_repeated_and_no_record_is_lost_or_repeated():
    faults = [Fault("poll", at, error=RetriableError()) for at in (5, 7)]
    source, seen = LinesSource(100, faults=faults), Seen()
    engine = engine_of(source, seen.record)
    engine.run()
    assert seen.lines == {"0-0": numbers(1, 100)}
    assert engine.view().tasks[0].retries == 2
    assert source.count("start") == 1


# testConnectorFailsIfMaxRetriesExceeded: there retries are counted over the whole run; ours in a row.
def test_the_engine_fails_when_no_retry_is_left():
    apart = [Fault("poll", at, error=RetriableError()) for at in (2, 4, 6)]
    seen = Seen()
    engine_of(LinesSource(60, faults=apart), seen.record, options={"errors_retries_max": 1}).run()
    assert seen.count == 60

    in_a_row = [Fault("poll", at, error=RetriableError()) for at in (3, 4)]
    seen, heard = Seen(), Heard()
    engine = engine_of(
        LinesSource(60, faults=in_a_row),
        seen.record,
        options={"errors_retries_max": 1},
        callbacks=heard.callbacks(),
    )
    with structlog.testing.capture_logs() as logs, pytest.raises(TailraceError):
        engine.run()
    assert seen.count == 20
    assert "engine has failed" in [entry["event"] for entry in logs]
    assert engine.view().story.endswith("POLLING_TASKS (failure) → STOPPING (everything stopped) → STOPPED")


# testEngineBasicLifecycleConsumerSequentially, ...NonSequentially
@pytest.mark.parametrize("order", ["ordered", "unordered", "key"])
def test_single_records_come_in_the_configured_order(order):
    seen = Seen()
    store = Store()
    options = {"record_processing": {"order": order, "threads": 4}}
    engine_of(LinesSource(60), seen.record, options=options, offsets=store).run()
    assert sorted(seen.lines["0-0"]) == numbers(1, 60)
    assert order != "ordered" or seen.lines["0-0"] == numbers(1, 60)
    assert store.line() == 60


# testCompletionCallbackCalledAfterConnectorStop
def test_the_completion_callback_is_called_after_the_connector_has_stopped():
    heard = Heard()
    engine_of(LinesSource(), Seen().record, callbacks=heard.callbacks()).run()
    assert heard.events[-2:] == ["connector_stopped", "completed"]


# testSmtReturnsNullToProcessor, testSmtReturnsNullToProcessorAndConvertor
@pytest.mark.parametrize("converter", [None, Texts()])
def test_dropped_records_are_not_delivered_and_count_as_processed(converter):
    got, store = [], Store()
    engine_of(
        LinesSource(10),
        on_batch=got.extend,
        transformations=[without(*range(2, 11, 2))],
        converter=converter,
        offsets=store,
    ).run()
    assert len(got) == 5
    assert store.line() == 10


# testGracefullyShutDownUponStopEngineException
def test_a_handler_may_end_the_engine():
    def stop_at(number):
        if number == 5:
            raise StopEngine

    heard = Heard()
    engine = engine_of(LinesSource(100, ends=False), Seen(stop_at).record, callbacks=heard.callbacks())
    engine.run()
    assert heard.completed[0]
    engine.close()


# testOffsetIsCommittedUponStopEngineException, testOffsetIsCommittedUponCountdown,
# testOffsetIsCommittedUponCustomShutdown: there is one way to end at a record, StopEngine; the handler itself
# counts or checks a condition. Their "before" variants (testOffsetIsCommittedBeforeCountdown,
# testOffsetIsCommittedBeforeCustomShutdown) mark a record as processed that the handler did not get; our
# engine has nothing that loses a record. To end before a record, close the engine at the one before.
@pytest.mark.parametrize("last", [1, 2, 5, 10])
def test_the_record_at_which_a_handler_ended_the_engine_is_committed(last):
    store, got = Store(), []

    def stop_after(record):
        got.append(record.after["number"])
        if record.after["number"] == last:
            raise StopEngine

    engine_of(LinesSource(10), stop_after, offsets=store, options={"offset_commit": {}}).run()
    assert got == numbers(1, last)
    assert store.line() == last
    rest = Seen()
    engine_of(LinesSource(10), rest.record, offsets=store).run()
    assert rest.lines.get("0-0", []) == numbers(last + 1, 10)


# testPollingCallbacksAreCalled
def test_callbacks_come_in_the_order_of_events():
    heard = Heard()
    engine_of(LinesSource(tasks=2), Seen().record, callbacks=heard.callbacks()).run()
    order = ["connector_started", "task_started 0", "polling_started", "polling_stopped", "task_stopped 1"]
    order += ["connector_stopped", "completed"]
    assert [heard.at(event) for event in order] == sorted(heard.at(event) for event in order)


# testCanStopEngineFromPollingCallback: there polling waits for the callback, and no record is seen. Here
# callbacks run beside it, so some may be: to get none, close the engine in connector_started.
@pytest.mark.parametrize("when", ["connector_started", "task_started", "polling_started"])
def test_a_callback_may_close_the_engine(when):
    holder = []
    heard = Heard(lambda what: holder[0].close() if what == when else None)
    holder.append(engine_of(LinesSource(ends=False), Seen().record, callbacks=heard.callbacks()))
    holder[0].run()
    assert heard.completed[0]


# testOffsetStorageFailure, interruptedOffsetCommitShutsDown: we never interrupt a commit. A store that raises
# an error fails as any other, and one that hangs delays the end by its timeout at most.
@pytest.mark.parametrize("error", [TailraceError(Kind.OFFSETS_UNWRITABLE, "no"), InterruptedError()])
def test_a_failed_write_of_offsets_is_repeated_and_the_engine_goes_on(error):
    def fail_at_first():
        if store.writes <= 2:
            raise error

    store, seen = Store(fail_at_first), Seen()
    engine_of(LinesSource(50), seen.record, offsets=store).run()
    assert seen.count == 50
    assert store.writes > 2
    assert store.line() == 50


def test_a_store_that_hangs_delays_the_end_no_longer_than_its_timeout():
    release = threading.Event()
    store, heard = Store(lambda: release.wait(FAR_S)), Heard()
    options = {"offset_commit": {"policy": "always", "timeout_ms": 50}}
    engine = engine_of(
        LinesSource(30), Seen().record, offsets=store, options=options, callbacks=heard.callbacks()
    )
    try:
        with pytest.raises(TailraceError, match="the write has not ended in time"):
            engine.run()
        assert not heard.completed[0]
    finally:
        release.set()


# testOffsetCommitPolicyCalledDuringIdlePeriod: ours is called without new records as long as there is
# something to commit; theirs always.
def test_a_periodic_commit_needs_no_new_records():
    clock, store, seen = MovableClock(), Store(), Seen()
    options = {"offset_commit": {"policy": "periodic", "interval_ms": 60_000}}
    with engine_of(
        LinesSource(10, ends=False), seen.record, options=options, offsets=store, clock=clock
    ) as engine:
        wait_until(lambda: engine.view().tasks[0].processed == 10, FAR_S)
        assert store.line() == 0
        clock.advance(60)
        wait_until(lambda: store.line() == 10, FAR_S)


# verifyNonAsciiContentHandledCorrectly
def test_text_of_any_script_arrives_unchanged():
    got = []
    engine_of(LinesSource(2, words="Ñ ñ 日本 𝄞"), lambda record: got.append(record.after["line"])).run()
    assert got == ["Ñ ñ 日本 𝄞 1", "Ñ ñ 日本 𝄞 2"]


# shouldStartAndUseFileConnectorUsingMemoryOffsetStorage
def test_the_next_engine_continues_where_this_one_ended():
    source, store, first, second = LinesSource(20), Store(), Seen(), Seen()
    engine_of(source, first.record, offsets=store).run()
    source.append(15)
    engine_of(source, second.record, offsets=store).run()
    assert (first.lines["0-0"], second.lines["0-0"]) == (numbers(1, 20), numbers(21, 35))


# shouldWorkToUseCustomChangeConsumer
def test_a_handler_of_batches_may_mark_records_itself():
    store = Store()

    def half(batch, committer):
        for record in batch:
            if record.after["number"] <= 5:
                committer.mark_processed(batch, record.place)
        committer.mark_batch_finished(batch)
        raise StopEngine

    engine_of(LinesSource(10, ends=False), on_batch=manual(half), offsets=store).run()
    assert store.line() == 5


# shouldRunEngineWithConsumerSettingOffsets
def test_a_handler_may_set_an_offset_which_is_stored_unchanged():
    store = Store()

    def own(batch, committer):
        for record in batch:
            committer.mark_processed(batch, record.place, {"line": record.after["number"], "mine": [1, "x"]})
        committer.mark_batch_finished(batch)

    engine_of(LinesSource(10), on_batch=manual(own), offsets=store).run()
    assert list(store.kept.values()) == [{"line": 10, "mine": [1, "x"]}]


# shouldRunDebeziumEngine
def test_headers_are_kept():
    got = []

    def add(group):
        values = pa.array(["h"] * len(group))
        yield group.with_headers(pa.StructArray.from_arrays([values, pa.nulls(len(group))], names=["a", "b"]))

    engine_of(
        LinesSource(3), lambda record: got.append(dict(record.headers)), transformations=[Step(add)]
    ).run()
    assert got == [{"a": "h"}] * 3


# shouldRunDebeziumEngineWithJson, testHeaderConverter, shouldSkipNullValueReturnedByHeaderConverter: headers
# are typed values, and there is no second converter for them: a handler that wants them as JSON
# converts them.
def test_json_events_have_text_and_unconverted_headers():
    got = []

    def add(group):
        values = [pa.array([2] * len(group)), pa.nulls(len(group), pa.string())]
        yield group.with_headers(pa.StructArray.from_arrays(values, names=["number", "none"]))

    engine_of(
        LinesSource(1),
        lambda event: got.append((json.loads(event.key), json.loads(event.value), event.headers)),
        transformations=[Step(add)],
        converter=JsonConverter(schemas_enable=True),
    ).run()
    ((key, value, headers),) = got
    assert key["payload"] == {"number": 1}
    assert value["payload"]["after"] == {
        "partition": "0-0",
        "number": 1,
        "line": "Generated line number 1",
    }
    assert value["schema"]["type"] == "struct"
    assert headers == {"number": 2}


# shouldRunDebeziumEngineWithString, ...WithMismatchedTypes
def test_a_converter_determines_the_types_of_keys_and_values():
    got = []
    engine_of(
        LinesSource(2),
        lambda event: got.append((event.key, event.value, event.record.place)),
        converter=Texts(),
    ).run()
    assert got == [("1", b"Generated line number 1", 0), ("2", b"Generated line number 2", 1)]


# invalidSmt, verifyBadCommitPolicyClassName: invalid arguments make no engine, and call no completion.
@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"transformations": [object()]}, "transformation"),
        ({"options": {"offset_commit": {"policy": "sometimes"}}}, "offset_commit.policy: must be one of"),
        ({"options": {"retries": 1}}, "retries: unknown key"),
        ({"options": {"tasks_on": "spark"}}, "spark"),
        ({"options": {"offset_storage": {"type": "log"}}, "offsets": None}, "offset_storage is log"),
        ({"on_batch": print}, "one of on_batch"),
        ({"handler": None}, "one of on_batch"),
        ({"handler": "print"}, "can't be"),
        ({"converter": object()}, "not a converter"),
        ({"source": object()}, "not a connector"),
        ({"source": "nosuch"}, "no installed package announces it"),
        ({"source": lambda: 1 / 0}, "ZeroDivisionError"),
    ],
)
def test_invalid_arguments_are_refused_before_there_is_an_engine(arguments, word):
    arguments = {"source": LinesSource(), "handler": print, **arguments}
    with pytest.raises(TailraceError) as caught:
        engine_of(arguments.pop("source"), arguments.pop("handler"), **arguments)
    assert caught.value.kind is Kind.CONFIG_INVALID
    assert word in caught.value.message
    assert caught.value.hint


# validationThrowsException
def test_a_connector_that_refuses_its_settings_ends_the_engine():
    class Refusing(LinesSource):
        def start(self, context):
            super().start(context)
            raise TailraceError(Kind.CONFIG_INVALID, "check the settings: no table", "name one")

    source, heard, store = Refusing(), Heard(), Store()
    engine = engine_of(source, Seen().record, callbacks=heard.callbacks(), offsets=store)
    with pytest.raises(TailraceError, match="no table") as caught:
        engine.start()
    assert caught.value.__cause__ is None
    assert source.calls == ["connector.start", "connector.stop"]
    assert store.calls == ["start", "stop"]
    assert heard.events == ["connector_stopped", "completed"]


# shouldHandleNoDefaultOffsetFlushInterval
def test_an_engine_needs_no_options():
    from tailrace.engine.engine import Engine

    seen, store = Seen(), Store()
    Engine(connector=LinesSource(5), on_record=seen.record, offsets=store).run()
    assert seen.count == store.line() == 5


def test_close_returns_soon():
    source = LinesSource(ends=False)
    engine = engine_of(source, Seen().record)
    engine.start()
    before = time.monotonic()
    engine.close()
    assert time.monotonic() - before < FAR_S / 2
