"""How an engine ends: failures by policy, timeouts, and calls from its own threads."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import threading
import time

import pytest

from tailrace import Engine
from tailrace.engine import failures
from tailrace.engine.contracts import RetriableError, StopEngine
from tailrace.engine.lifecycle import State
from tailrace.engine.processing import manual
from tailrace.engine.supervision import Phase
from tailrace.engine.tasks import TaskThread
from tailrace.errors import Kind, TailraceError
from tailrace.testing import Fault, LinesSource
from tests.support.engines import Heard, Seen, Store, engine_of
from tests.support.wait import wait_until

FAR_S = 60.0


def numbers(first, last):
    return list(range(first, last + 1))


def fails_once(at, error):
    """Return a function for a handler that raises once, at a line."""
    left = [error]

    def fault(number):
        if number == at and left:
            raise left.pop()

    return fault


# ------------------------------------------------------------------ on_task_failure


def test_by_default_one_failure_stops_all_tasks_in_order():
    source = LinesSource(50, tasks=3, ends=False, faults=[Fault("poll", 3, task=1, error=ValueError("4711"))])
    store, heard = Store(), Heard()
    engine = engine_of(source, Seen().record, offsets=store, callbacks=heard.callbacks())
    with pytest.raises(TailraceError) as caught:
        engine.run()
    error = caught.value
    assert (error.kind, error.context) == (Kind.TASK_FAILED, {"task": 1})
    assert "poll: task 1 failed with ValueError in source.py, line" in error.message
    assert "4711" not in str(error)
    assert not source.open
    # What the failed task had delivered is committed nevertheless.
    assert store.line("1-0") == 20
    assert [task.state for task in engine.view().tasks] == [Phase.STOPPED, Phase.FAILED, Phase.STOPPED]
    assert engine.status()["error"]["kind"] == "task_failed"
    assert heard.completed[2] is error


def test_a_failed_task_is_restarted_alone_and_loses_nothing():
    source = LinesSource(50, tasks=2, faults=[Fault("poll", 3, task=1, error=ValueError())])
    seen, heard = Seen(fails_once(35, ValueError())), Heard()
    engine = engine_of(
        source, seen.record, options={"on_task_failure": "restart"}, callbacks=heard.callbacks()
    )
    engine.run()
    assert set(seen.lines["0-0"]) == set(seen.lines["1-0"]) == set(numbers(1, 50))
    view = engine.view()
    assert view.tasks[0].restarts + view.tasks[1].restarts == 2
    assert source.count("start", 0) + source.count("start", 1) == 4
    assert source.count("stop", 0) + source.count("stop", 1) == 4
    assert heard.completed[0]


def test_a_restarted_task_that_runs_shows_no_error():
    source = LinesSource(10, ends=False, faults=[Fault("poll", 1, error=ValueError())])
    engine = engine_of(source, Seen().record, options={"on_task_failure": "restart"})
    engine.start()
    try:
        wait_until(lambda: engine.view().tasks[0].processed == 10, FAR_S, "its lines")
        task = engine.view().tasks[0]
        assert (task.state, task.restarts, task.error) == (Phase.POLLING, 1, None)
    finally:
        engine.close()


def test_restarts_without_progress_are_limited(monkeypatch):
    monkeypatch.setattr(failures, "TASK_RESTARTS_MAX", 1)
    faults = [Fault("poll", at, error=ValueError()) for at in (2, 4, 6, 8)]
    options = {"on_task_failure": "restart"}
    seen = Seen()
    engine_of(LinesSource(60, faults=faults), seen.record, options=options).run()
    assert seen.lines["0-0"] == numbers(1, 60)

    poisoned = Seen(lambda number: 1 / 0 if number == 25 else None)
    engine = engine_of(LinesSource(60), poisoned.record, options=options)
    with pytest.raises(TailraceError, match="ZeroDivisionError"):
        engine.run()
    # Its first run made progress up to the record that fails; the one after the restart made none.
    assert poisoned.lines["0-0"] == numbers(1, 24)
    assert engine.view().tasks[0].restarts == 1


def test_a_task_whose_start_fails_is_restarted_as_well():
    faults = [Fault("start", at, task=1, error=ValueError()) for at in (1, 2)]
    seen = Seen()
    engine_of(
        LinesSource(20, tasks=2, faults=faults), seen.record, options={"on_task_failure": "restart"}
    ).run()
    assert seen.lines == {"0-0": numbers(1, 20), "1-0": numbers(1, 20)}


@pytest.mark.parametrize(("method", "error"), [("poll", ValueError()), ("start", RetriableError())])
def test_a_task_whose_stop_fails_has_its_next_attempt_all_the_same(method, error):
    faults = [Fault(method, error=error), Fault("stop", error=OSError())]
    source, seen = LinesSource(20, faults=faults), Seen()
    engine_of(source, seen.record, options={"on_task_failure": "restart"}).run()
    assert seen.lines["0-0"] == numbers(1, 20)
    assert source.count("stop") == 2


def test_an_engine_with_an_isolated_task_fails_with_its_error_at_the_end():
    faults = [Fault("start", task=0, error=ValueError()), Fault("poll", 2, task=2, error=KeyError())]
    seen, heard = Seen(), Heard()
    source = LinesSource(40, tasks=3, faults=faults)
    engine = engine_of(
        source, seen.record, options={"on_task_failure": "isolate"}, callbacks=heard.callbacks()
    )
    with pytest.raises(TailraceError, match="task 0 failed with ValueError"):
        engine.run()
    assert seen.lines == {"1-0": numbers(1, 40), "2-0": numbers(1, 10)}
    assert [task.state for task in engine.view().tasks] == [Phase.FAILED, Phase.STOPPED, Phase.FAILED]
    assert not heard.completed[0]
    assert not source.open


def test_an_engine_ends_when_all_tasks_are_isolated():
    faults = [Fault("poll", 2, task=task, error=ValueError()) for task in range(3)]
    source = LinesSource(40, tasks=3, ends=False, faults=faults)
    with pytest.raises(TailraceError, match="ValueError"):
        engine_of(source, Seen().record, options={"on_task_failure": "isolate"}).run()


# ------------------------------------------------------------------ retries


def test_a_start_with_a_retriable_error_is_repeated_with_a_new_task():
    faults = [Fault("start", at, error=TailraceError(Kind.SOURCE_UNREACHABLE, "no")) for at in (1, 2)]
    source, seen = LinesSource(faults=faults), Seen()
    engine = engine_of(source, seen.record)
    engine.run()
    assert seen.count == 10
    assert (source.count("start"), source.count("stop")) == (3, 3)
    assert engine.view().tasks[0].retries == 2


def test_the_engine_may_be_closed_just_before_a_start_is_repeated(monkeypatch):
    count_retry = TaskThread._count_retry

    def closing(self):
        count_retry(self)
        engine.close()

    monkeypatch.setattr(TaskThread, "_count_retry", closing)
    source = LinesSource(tasks=2, faults=[Fault("start", error=RetriableError())])
    engine = engine_of(source, Seen().record, options={"task_management_timeout_ms": 30_000})
    engine.run()
    assert engine.error is None
    assert not source.open


@pytest.mark.parametrize("kind", ["on_batch", "on_record"])
def test_records_are_delivered_again_after_a_retriable_error_of_the_handler(kind):
    got, left = [], [RetriableError(), TailraceError(Kind.SINK_WRITE_FAILED, "no")]

    def handle(given):
        records = list(given) if kind == "on_batch" else [given]
        if left and records[-1].after["number"] == 20:
            raise left.pop()
        got.extend(record.after["number"] for record in records)

    store = Store()
    engine_of(LinesSource(50), offsets=store, **{kind: handle}).run()
    assert got == numbers(1, 50)
    assert store.line() == 50


@pytest.mark.slow
def test_close_does_not_wait_for_retries():
    source, seen = LinesSource(ends=False), Seen(lambda _: (_ for _ in ()).throw(RetriableError()))
    options = {"errors_retry_delay_initial_ms": 3_600_000, "errors_retry_delay_max_ms": 3_600_000}
    store = Store()
    engine = engine_of(source, seen.record, options=options, offsets=store)
    engine.start()
    wait_until(lambda: source.count("poll") == 1, FAR_S)
    engine.close(FAR_S)
    assert engine.error is None
    assert store.line() == 0


# ------------------------------------------------------------------ timeouts


@pytest.mark.slow
def test_a_start_has_a_timeout():
    source = LinesSource(tasks=2, faults=[Fault("start", task=1, delay_s=FAR_S)])
    engine = engine_of(source, Seen().record, options={"task_management_timeout_ms": 1000})
    with pytest.raises(TailraceError) as caught:
        engine.start()
    assert (caught.value.kind, caught.value.context) == (Kind.TASK_TIMED_OUT, {"tasks": [1]})
    assert not source.open


@pytest.mark.parametrize("method", ["start", "poll", "stop"])
@pytest.mark.slow
def test_a_task_that_hangs_for_ever_does_not_block_the_end(method):
    release = threading.Event()
    fault = Fault(method, task=1, call=lambda: release.wait(FAR_S))
    source, seen, heard = LinesSource(tasks=2, ends=False, faults=[fault]), Seen(), Heard()
    options = {"task_management_timeout_ms": 300, "record_processing": {"shutdown_timeout_ms": 100}}
    engine = engine_of(source, seen.record, options=options, callbacks=heard.callbacks())
    try:
        if method == "start":
            with pytest.raises(TailraceError):
                engine.start()
        else:
            engine.start()
            wait_until(lambda: seen.count >= 10, FAR_S)
            engine.close(FAR_S)
        assert engine.state is State.STOPPED
        assert engine.error.kind is Kind.TASK_TIMED_OUT
        assert source.count("stop", 1) == 1
        assert "connector.stop" in source.calls
        assert not heard.completed[0]
    finally:
        release.set()
    wait_until(lambda: not [t for t in threading.enumerate() if "task 1" in t.name], FAR_S)


def test_records_under_way_are_cancelled_after_their_timeout():
    entered, release = threading.Event(), threading.Event()

    def hang(record):
        entered.set()
        release.wait(FAR_S)

    store = Store()
    options = {"record_processing": {"shutdown_timeout_ms": 0}}
    engine = engine_of(LinesSource(ends=False), hang, options=options, offsets=store)
    engine.start()
    try:
        assert entered.wait(FAR_S)
        engine.close(FAR_S)
        assert engine.error is None
    finally:
        release.set()
    assert store.line() == 0


def test_the_end_waits_for_records_under_way_within_their_timeout():
    entered, release = threading.Event(), threading.Event()

    def slow(batch):
        entered.set()
        assert release.wait(FAR_S)

    store = Store()
    options = {"record_processing": {"shutdown_timeout_ms": 60_000}, "offset_commit": {}}
    engine = engine_of(LinesSource(10, ends=False), on_batch=slow, options=options, offsets=store)
    engine.start()
    assert entered.wait(FAR_S)
    closing = threading.Thread(target=engine.close)
    closing.start()
    wait_until(lambda: engine.state is State.STOPPING, FAR_S)
    assert closing.is_alive()
    release.set()
    closing.join(FAR_S)
    assert store.line() == 10


@pytest.mark.parametrize("marks", [True, False])
def test_the_end_waits_for_handlers_that_mark_later_within_the_timeout(marks):
    store, timers = Store(), []

    def handle(batch, committer):
        if marks:
            timers.append(threading.Timer(0.2, committer.mark_processed, (batch,)))
            timers[-1].start()

    engine_of(
        LinesSource(30),
        on_batch=manual(handle),
        offsets=store,
        options={"record_processing": {"shutdown_timeout_ms": 60_000 if marks else 50}},
    ).run()
    assert store.line() == (30 if marks else 0)
    for timer in timers:
        timer.join()


@pytest.mark.slow
def test_a_connector_that_hangs_in_stop_does_not_block_the_end():
    release = threading.Event()

    class Hanging(LinesSource):
        def stop(self):
            release.wait(FAR_S)

    engine = engine_of(Hanging(), Seen().record, options={"task_management_timeout_ms": 1000})
    try:
        with pytest.raises(TailraceError, match="stop the connector: not done after 1 s"):
            engine.run()
    finally:
        release.set()


def test_a_transformation_that_hangs_in_close_does_not_block_the_end():
    release = threading.Event()

    class Hanging:
        def apply(self, group):
            yield group

        def close(self):
            release.wait(FAR_S)

    heard = Heard()
    try:
        engine_of(
            LinesSource(),
            Seen().record,
            transformations=[Hanging()],
            callbacks=heard.callbacks(),
            options={"task_management_timeout_ms": 100},
        ).run()
        assert heard.completed[0]
        assert not release.is_set()
    finally:
        release.set()


@pytest.mark.parametrize("order", ["ordered", "unordered", "key"])
def test_a_transformation_that_hangs_blocks_only_its_own_task(order):
    release = threading.Event()

    class Hanging:
        def apply(self, group):
            if group.column("after").field("partition")[0].as_py() == "0-0":
                release.wait(FAR_S)
            return [group]

        def close(self):
            pass

    seen = Seen()
    engine = engine_of(
        LinesSource(300, tasks=3),
        seen.record,
        transformations=[Hanging()],
        options={"record_processing": {"threads": 1, "order": order}},
    )
    engine.start()
    try:
        wait_until(lambda: all(len(seen.lines[name]) == 300 for name in ("1-0", "2-0")), 10)
        assert not seen.lines["0-0"]
    finally:
        release.set()
    assert engine.wait(FAR_S)
    assert len(seen.lines["0-0"]) == 300


@pytest.mark.parametrize("error", [ValueError(), SystemExit()])
def test_an_error_of_a_connector_in_stop_makes_the_engine_fail(error):
    class Failing(LinesSource):
        def stop(self):
            raise error

    heard, store = Heard(), Store()
    engine = engine_of(Failing(), Seen().record, callbacks=heard.callbacks(), offsets=store)
    with pytest.raises(TailraceError, match=f"stop the connector: failed with {type(error).__name__}"):
        engine.run()
    assert heard.events[-2:] == ["connector_stopped", "completed"]
    assert store.calls == ["start", "stop"]


# ------------------------------------------------------------------ calls of close


@pytest.mark.parametrize("where", ["on_record", "on_batch", "poll", "start", "commit", "connector"])
@pytest.mark.parametrize("order", ["ordered", "unordered"])
def test_the_engine_may_be_closed_from_its_own_callbacks(where, order):
    holder = []

    def close(*_):
        if holder[0].state is not State.STOPPED:
            holder[0].close()

    class Closing(LinesSource):
        def start(self, context):
            super().start(context)
            if where == "connector":
                close()

    faults = [Fault(where, call=close)] if where in {"poll", "start", "commit"} else []
    handlers = {where: close} if where.startswith("on_") else {"on_record": print}
    source = Closing(10, ends=False, faults=faults)
    options = {"record_processing": {"order": "ordered" if where == "on_batch" else order}}
    holder.append(engine_of(source, options=options, **handlers))
    holder[0].run()
    assert holder[0].error is None
    assert not source.open


def test_an_engine_closed_before_its_start_cannot_be_started():
    heard = Heard()
    engine = engine_of(LinesSource(), Seen().record, callbacks=heard.callbacks())
    engine.close()
    assert engine.state is State.STOPPED
    assert heard.events == ["completed"]
    with pytest.raises(TailraceError, match="it has stopped"):
        engine.start()


def test_an_engine_that_failed_can_be_closed():
    engine = engine_of(LinesSource(faults=[Fault("poll", error=ValueError())]), Seen().record)
    with pytest.raises(TailraceError) as caught:
        engine.run()
    story = engine.view().story
    engine.close()
    assert engine.error is caught.value
    assert engine.view().story == story


def test_a_commit_after_a_mark_on_a_users_thread_may_close_the_engine():
    closed_s = []

    def close():
        began_s = time.monotonic()
        engine.close()
        closed_s.append(time.monotonic() - began_s)

    def mark_elsewhere(batch, committer):
        marking = threading.Thread(target=committer.mark_processed, args=(batch,))
        marking.start()
        marking.join()

    source = LinesSource(10, ends=False, faults=[Fault("commit", call=close)])
    engine = engine_of(source, on_batch=manual(mark_elsewhere))
    engine.run()
    assert engine.error is None
    assert closed_s[0] < 1  # it returned at once: the end waits for the commit


@pytest.mark.follows("task_timed_out")
def test_many_threads_may_close_at_once_and_all_wait_for_the_end():
    entered, release = threading.Event(), threading.Event()
    fault = Fault("stop", call=lambda: (entered.set(), release.wait(FAR_S)))
    engine = engine_of(LinesSource(ends=False, faults=[fault]), Seen().record)
    engine.start()
    closers = [threading.Thread(target=engine.close) for _ in range(5)]
    for closer in closers:
        closer.start()
    assert entered.wait(FAR_S)
    with pytest.raises(TailraceError) as caught:
        engine.close(0.01)
    assert caught.value.kind is Kind.TASK_TIMED_OUT
    assert "the `timeout_s` of close() is the limit" in caught.value.hint
    assert all(closer.is_alive() for closer in closers)
    release.set()
    engine.close(FAR_S)
    for closer in closers:
        closer.join(FAR_S)
    assert engine.state is State.STOPPED


def test_a_connector_may_report_an_error_at_any_time():
    class Reporting(LinesSource):
        def start(self, context):
            super().start(context)
            self.report = context.report

    source, seen = Reporting(ends=False), Seen()
    engine = engine_of(source, seen.record)
    engine.start()
    wait_until(lambda: seen.count == 10, FAR_S)
    source.report(TailraceError(Kind.SOURCE_CHANGED, "another database"))
    with pytest.raises(TailraceError, match="another database"):
        engine.wait(FAR_S)


def test_tasks_finish_independently_and_the_engine_ends_with_the_last():
    source, seen, store = LinesSource(30, tasks=2), Seen(), Store()
    hold = threading.Event()

    def handle(record):
        if record.after["partition"] == "1-0":
            assert hold.wait(FAR_S)
        seen.record(record)

    engine = engine_of(source, handle, offsets=store)
    engine.start()
    wait_until(lambda: engine.view().tasks[0].state is Phase.FINISHED, FAR_S)
    assert not engine.wait(0)
    hold.set()
    assert engine.wait(FAR_S)
    assert (store.line("0-0"), store.line("1-0")) == (30, 30)


def test_a_source_that_plans_no_task_or_too_many_is_an_error():
    for tasks in (0, 3):
        engine = engine_of(LinesSource(tasks=3), Seen().record, tasks_max=2)
        engine._parts.connector.task_settings = lambda _, tasks=tasks: [{}] * tasks
        with pytest.raises(TailraceError, match=f"planned {tasks}"):
            engine.run()


# ------------------------------------------------------------------ with, and signals


def test_with_starts_and_closes():
    seen = Seen()
    with engine_of(LinesSource(ends=False), seen.record) as engine:
        assert engine.state is State.POLLING_TASKS
        wait_until(lambda: seen.count == 10, FAR_S)
    assert engine.state is State.STOPPED
    with engine_of(LinesSource(), seen.record) as engine:
        engine.run()
        assert engine.state is State.STOPPED
    with pytest.raises(TailraceError, match="create another one to run again") as raised:
        engine.run()
    assert raised.value.kind is Kind.ENGINE_MISUSED


@pytest.mark.parametrize("other", [None, KeyError()])
def test_with_raises_the_engines_failure_unless_the_block_raises_another_error(other):
    entered = threading.Event()
    fault = Fault("poll", call=lambda: entered.wait(FAR_S), error=ValueError())

    def program():
        with engine_of(LinesSource(faults=[fault]), Seen().record) as engine:
            entered.set()
            wait_until(lambda: engine.state is State.STOPPED, FAR_S)
            if other is not None:
                raise other

    with pytest.raises(TailraceError if other is None else KeyError):
        program()


@pytest.mark.parametrize("call", [Engine.wait, Engine.run])
def test_waiting_on_a_thread_of_the_engine_is_refused(call):
    holder, raised = [], []

    def handle(record):
        try:
            call(holder[0])
        except TailraceError as error:
            raised.append(error)
        raise StopEngine

    holder.append(engine_of(LinesSource(), handle))
    with holder[0]:
        assert holder[0].wait(FAR_S)
    assert raised[0].kind is Kind.ENGINE_MISUSED


def test_run_with_task_needs_a_running_task():
    engine = engine_of(LinesSource(ends=False), Seen().record)
    with pytest.raises(TailraceError, match="use a task"):
        engine.run_with_task(print)
    with engine:
        assert engine.run_with_task(lambda task: type(task).__name__) == "LinesTask"
    with pytest.raises(TailraceError, match="use a task"):
        engine.run_with_task(print)


PROGRAM = """
import signal, structlog, logging
signal.signal(signal.SIGTERM, signal.default_int_handler)
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
import tailrace
from tailrace.testing import LinesSource
closed = []
engine = tailrace.Engine(
    connector=LinesSource(ends=False), on_record=lambda record: print("record", flush=True),
    callbacks=tailrace.Callbacks(completed=lambda *all: print("completed", all[0], flush=True)),
)
try:
    engine.run()
except KeyboardInterrupt:
    print("interrupted", engine.state, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_or_a_signal_treated_as_one_closes_the_engine_and_is_raised_again(sent):
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            assert [running.stdout.readline() for _ in range(10)] == ["record\n"] * 10
            running.send_signal(sent)
            out, _ = running.communicate(timeout=FAR_S)
        finally:
            running.kill()
    assert out == "completed True\ninterrupted stopped\n"
    assert running.returncode == 0


@pytest.mark.slow
def test_a_signal_that_does_not_interrupt_the_wait_is_handled():
    # As a signal between Python's last check for signals and the main thread's wait.
    elsewhere = "signal.pthread_kill(threading.get_ident(), signal.SIGINT)"
    program = PROGRAM.replace("import signal,", "import signal, threading,").replace(
        'print("record", flush=True)', f'record.after["number"] == 5 and {elsewhere}'
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=FAR_S, check=True
    )
    assert out.stdout == "completed True\ninterrupted stopped\n"


@pytest.mark.slow
def test_idle_tasks_use_almost_no_cpu_time():
    source = LinesSource(0, tasks=100, ends=False)
    with engine_of(source, Seen().record):
        before_cpu, before = time.process_time(), time.monotonic()
        threading.Event().wait(1.0)
        share = (time.process_time() - before_cpu) / (time.monotonic() - before)
    assert share < 0.10


@pytest.mark.parametrize("after_s", [1e-6, 0.3])
def test_ctrl_c_during_the_start_ends_the_engine(after_s: float) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    source = LinesSource(100, faults=[Fault("start", delay_s=1.0)])
    engine = engine_of(source, lambda _: None)

    def begin() -> None:
        signal.setitimer(signal.ITIMER_REAL, after_s)
        with engine:
            engine.wait(60)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            begin()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    wait_until(lambda: engine._thread is None or not engine._thread.is_alive(), 60, "the end")


@pytest.mark.parametrize("order", ["ordered", "unordered", "key"])
@pytest.mark.slow
def test_a_restarted_task_waits_for_a_handler_that_exceeds_its_timeout(order):
    entered, release = threading.Event(), threading.Event()
    fault = Fault("poll", 3, error=ValueError(), call=lambda: entered.wait(FAR_S))
    source = LinesSource(40, faults=[fault])
    seen, running, beside = Seen(), set(), []

    def handle(record):
        number = record.after["number"]
        if number in running:
            beside.append(number)
        running.add(number)
        if number == 5 and not entered.is_set():
            entered.set()
            release.wait(FAR_S)
        seen.record(record)
        running.discard(number)

    engine = engine_of(
        source,
        handle,
        options={
            "on_task_failure": "restart",
            "record_processing": {"order": order, "threads": 3, "shutdown_timeout_ms": 50},
        },
    )
    engine.start()
    try:
        wait_until(lambda: source.count("stop") == 1, FAR_S)
        given = seen.count
        # The task is not restarted yet, so no more is delivered.
        assert engine.view().tasks[0].state is Phase.RESTARTING
        with pytest.raises(AssertionError, match="waited"):
            wait_until(lambda: source.count("start") > 1 or seen.count > given, 0.5)
    finally:
        release.set()
    assert engine.wait(FAR_S)
    assert not beside
    assert set(seen.lines["0-0"]) == set(numbers(1, 40))
    if order == "ordered":
        assert seen.lines["0-0"] == [*numbers(1, 5), *numbers(5, 40)]


@pytest.mark.slow
def test_a_restarted_task_waits_for_a_write_of_offsets_that_exceeds_its_timeout():
    release, writes = threading.Event(), []

    class Hanging(Store):
        def write(self, offsets, timeout_s):
            if not writes:
                writes.append("began")
                assert release.wait(FAR_S)
            super().write(offsets, timeout_s)
            writes.append(self.line())

    def fail(at):
        if at == 11 and not release.is_set():
            threading.Timer(0.1, release.set).start()
            raise ValueError

    seen, store = Seen(fail), Hanging()
    options = {
        "on_task_failure": "restart",
        "errors_retry_delay_initial_ms": 1,
        "offset_commit": {"policy": "always", "timeout_ms": 10},
    }
    engine_of(LinesSource(30), seen.record, offsets=store, options=options).run()
    assert writes == ["began", 10, 20, 30]
    assert seen.count == 30  # no record repeats that the late write committed


def test_an_engine_fails_instead_of_restarting_a_task_whose_handler_never_returns():
    entered, release = threading.Event(), threading.Event()
    fault = Fault("poll", 3, error=ValueError(), call=lambda: entered.wait(FAR_S))
    source = LinesSource(40, faults=[fault])

    def hang(record):
        entered.set()
        release.wait(FAR_S)

    options = {
        "on_task_failure": "restart",
        "task_management_timeout_ms": 500,
        "record_processing": {"shutdown_timeout_ms": 0},
    }
    engine = engine_of(source, hang, options=options)
    try:
        with pytest.raises(TailraceError, match="restart a task whose handler still runs") as caught:
            engine.run()
    finally:
        release.set()
    assert caught.value.kind is Kind.TASK_TIMED_OUT
    assert source.count("start") == 1


@pytest.mark.parametrize("method", ["start", "poll"])
def test_an_error_that_is_retried_is_shown_until_the_retry_succeeds(method):
    error = TailraceError(Kind.SOURCE_UNREACHABLE, "connect: nobody listens")
    fails = threading.Event()
    fails.set()

    class Absent(LinesSource):
        def reached(self, what, *rest):
            super().reached(what, *rest)
            if what == method and fails.is_set():
                raise error

    engine = engine_of(Absent(10, ends=False), Seen().record)
    starting = threading.Thread(target=engine.start)
    starting.start()
    try:
        found = wait_until(lambda: engine.error, FAR_S, "the error")
        assert (found.kind, found.context) == (Kind.SOURCE_UNREACHABLE, {"task": 0})
        task = wait_until(lambda: engine.view().tasks[0], FAR_S)
        assert task.error.kind is task.errors[0].kind is Kind.SOURCE_UNREACHABLE
        assert 'source_errors{engine="engine",task="0"} 1.0' in engine.metrics.text()
        fails.clear()
        wait_until(lambda: engine.view().tasks[0].processed == 10, FAR_S, "its lines")
        assert engine.error is None
        assert engine.view().tasks[0].error is None
        assert 'source_errors{engine="engine",task="0"} 0.0' in engine.metrics.text()
    finally:
        fails.clear()
        starting.join(FAR_S)
        engine.close()


def test_a_process_that_was_forked_while_the_engine_runs_waits_for_nothing():
    engine = engine_of(LinesSource(10, ends=False), Seen().record)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def leave():
        engine.close()
        try:
            engine.wait()
        except TailraceError as error:
            theirs.send(str(error.kind))

    with engine:
        child = context.Process(target=leave)
        child.start()
        child.join(FAR_S)
        if child.exitcode is None:
            child.kill()
        assert child.exitcode == 0
        assert ours.recv() == "engine_misused"
        assert engine.state is State.POLLING_TASKS
