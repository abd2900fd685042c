"""Spark jobs of one attempt of a task: what is submitted while jobs run goes together into the next one.

A function is pickled once for an attempt of a task, and unpickled once in each Python worker: what it keeps
(a connection, say) is there for the next call. What it raises is an outcome like others, so that Spark
does not try again what is ours to decide about.

A job has its price whatever it does, so many small batches share one, and a large one is many tasks
of one. Jobs run from threads of the engine's pool, several at once; Spark's own order (first
come, first served) has earlier batches done first.
"""

from __future__ import annotations

import threading
import traceback
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pyspark.serializers import CPickleSerializer

from tailrace.engine.failures import GivenUpError, named, raised_elsewhere
from tailrace.errors import Kind, TailraceError
from tailrace.spark.jobs import JobGroup, collect, translated

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Load = TypeVar("Load")
Done = TypeVar("Done")

#: Bytes that a job carries at most, unless it has one load alone; each is copied through the JVM.
JOB_BYTES_MAX = 64 << 20


#: Of Spark's own connections between processes; nothing of it is kept.
wire: Any = CPickleSerializer()

#: Functions that a Python worker keeps.
_KEPT_MAX = 16

_kept: OrderedDict[str, Callable[[Any], Any]] = OrderedDict()


@dataclass(frozen=True, slots=True)
class ExecutorCall:
    """A function with its own name, as executors get it.

    :param name: no other function of any attempt has it.
    :param pickled: the function, of one argument.
    """

    name: str
    pickled: bytes

    def __call__(self, loads: Iterable[bytes]) -> Iterator[bytes]:
        """Call the function with each of `loads`; yield whether it returned, and what or why not."""
        for load in loads:
            try:
                outcome = (True, self._function()(wire.loads(load)))
                carried = wire.dumps(outcome)
            except BaseException as error:  # noqa: BLE001 - what it means is decided on the driver
                carried = wire.dumps((False, portable(error)))
            yield carried

    def _function(self) -> Callable[[Any], Any]:
        found = _kept.get(self.name)
        if found is None:
            found = _kept[self.name] = wire.loads(self.pickled)
            while len(_kept) > _KEPT_MAX:
                _kept.popitem(last=False)
        return found


def portable(error: BaseException) -> BaseException:
    """Return `error` as it can be carried to the driver, with where it was raised."""
    place = named(error)
    frames = "".join(traceback.format_tb(error.__traceback__))
    try:
        raised_elsewhere(error, place)
        error.add_note(f"raised on an executor:\n{frames}")
        found = wire.loads(wire.dumps(error))
        assert isinstance(found, type(error))
    except Exception:  # noqa: BLE001 - whatever its pickling does
        return TailraceError(
            Kind.TASK_FAILED,
            f"run on an executor: {place}, an error that can't be pickled",
            "let what handlers and transformations raise be picklable, so that it can be reported whole",
        )
    return found


class Jobs(Generic[Load, Done]):
    """Has a function called on executors. Any thread.

    :param session: returns the session; called for each job, as Spark may have been started again.
    :param executor: whose threads wait for jobs.
    :param at_once: jobs at a time, at most.
    :param shut: once it is set, what has not begun is cancelled.
    :param what: for Spark's user interface: `shop, task 0: handler`.
    """

    def __init__(
        self,
        session: Callable[[], SparkSession],
        function: bytes,
        executor: Executor,
        at_once: int,
        shut: threading.Event,
        what: str,
    ) -> None:
        self._session = session
        self._executor = executor
        self._at_once = at_once
        self._shut = shut
        self._group = JobGroup(f"tailrace-{uuid.uuid4()}", what)
        self._call = ExecutorCall(self._group.name, function)
        self._lock = threading.Lock()
        self._waiting: deque[tuple[bytes, Future[Done]]] = deque()
        self._running = 0
        self._cancelled = False

    def submit(self, load: Load) -> Future[Done]:
        """Have the function called with `load`.

        The future's exception is what the function raised, or `SPARK_FAILED`; `GivenUpError` if the end
        came meanwhile. It is cancelled if the call had not begun then.
        """
        future: Future[Done] = Future()
        carried = wire.dumps(load)
        with self._lock:
            is_over = self._cancelled
            if not is_over:
                self._waiting.append((carried, future))
                if self._running >= self._at_once:
                    return future
                self._running += 1
        if is_over:
            _drop(future)  # nobody looks for it any more
        else:
            self._go_on()
        return future

    def cancel(self) -> None:
        """Have jobs that run given up, and no other begun. What their tasks did is not heard of."""
        with self._lock:
            if self._cancelled:
                return
            self._cancelled = True
            waiting, running = list(self._waiting), self._running
            self._waiting.clear()
        for _, future in waiting:
            _drop(future)
        if running:
            self._group.cancel(self._session)

    def _work(self) -> None:
        # On the pool: one job, then others have the thread.
        taken = self._take()
        if taken:
            self._run(taken)
        with self._lock:
            if not self._waiting:
                self._running -= 1
                return
        self._go_on()

    def _go_on(self) -> None:
        try:
            self._executor.submit(self._work)
        except RuntimeError:  # the engine has ended
            with self._lock:
                self._running -= 1
                waiting = list(self._waiting)
                self._waiting.clear()
            for _, future in waiting:
                _drop(future)

    def _take(self) -> list[tuple[bytes, Future[Done]]]:
        taken: list[tuple[bytes, Future[Done]]] = []
        size = 0
        with self._lock:
            while self._waiting and (not taken or size + len(self._waiting[0][0]) <= JOB_BYTES_MAX):
                load, future = self._waiting.popleft()
                if self._shut.is_set() or self._cancelled:
                    _drop(future)
                elif future.set_running_or_notify_cancel():
                    taken.append((load, future))
                    size += len(load)
        return taken

    def _run(self, taken: Sequence[tuple[bytes, Future[Done]]]) -> None:
        try:
            outcomes = self._job([load for load, _ in taken])
        except BaseException as error:  # noqa: BLE001 - the futures have it
            failure = GivenUpError() if self._cancelled else translated(error)
            for _, future in taken:
                future.set_exception(failure)
            return
        for (_, future), outcome in zip(taken, outcomes, strict=True):
            is_done, found = _unpickled(outcome)
            if is_done:
                future.set_result(found)
            else:
                future.set_exception(found)

    def _job(self, loads: Sequence[bytes]) -> list[bytes]:
        session = self._session()
        tasks = min(len(loads), 2 * session.sparkContext.defaultParallelism)
        return collect(session, self._call, loads, tasks, self._group)


def _unpickled(outcome: bytes) -> tuple[bool, Any]:
    # Whether the function returned, and what or why not.
    try:
        is_done, found = wire.loads(outcome)
    except Exception as error:  # noqa: BLE001 - whatever its unpickling does
        return False, TailraceError(
            Kind.TASK_FAILED,
            f"take over what an executor made: unpickling it raised {type(error).__name__}",
            "let what handlers and transformations return or raise be of classes that can be imported on the "
            "driver as on executors",
        )
    return is_done, found


def _drop(future: Future[Any]) -> None:
    # `concurrent.futures.wait` takes one that is cancelled for done only once it was notified.
    future.cancel()
    future.set_running_or_notify_cancel()


def pickled(function: Callable[[Any], Any], what: str) -> bytes:
    """Return a function as executors get it, what it refers to included.

    :param what: for the message: `the handler`.
    :raises TailraceError: `CONFIG_INVALID` if that can't be.
    """
    from pyspark import cloudpickle

    try:
        found: bytes = cloudpickle.dumps(function)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"create the engine: {what} can't be carried to executors, {type(error).__name__} was raised",
            "what it refers to must pickle, so no locks, connections or sessions: let it make them "
            "when it is first called; the cause of this error names the object",
        ) from error
    return found
