"""Spark jobs of one attempt of a task: loads that are submitted while jobs run share the next job.

A function is pickled once for an attempt of a task, and unpickled once in each Python worker: objects that
it keeps (a connection, say) are available to the next call. Its errors are returned like results, so that
Spark does not retry: the engine decides about retries.

A job has a fixed cost, so many small batches share one, and a large batch becomes many tasks of one. Jobs
run from threads of the engine's pool, several at once; Spark's scheduling (FIFO) processes earlier batches
first.
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

#: Limit of a job's loads, in bytes, unless it has only one load; each byte is copied through the JVM.
JOB_BYTES_MAX = 64 << 20


#: The serializer of Spark's connections between processes; nothing that it writes is stored.
wire: Any = CPickleSerializer()

#: Number of functions that a Python worker caches: more than an engine has tasks.
_KEPT_MAX = 256

_kept: OrderedDict[str, Callable[[Any], Any]] = OrderedDict()


@dataclass(frozen=True, slots=True)
class ExecutorCall:
    """A pickled function with a unique name, as Spark executors get it.

    :param name: unique among the functions of all attempts.
    :param pickled: the function, of one argument.
    """

    name: str
    pickled: bytes

    def __call__(self, loads: Iterable[bytes]) -> Iterator[bytes]:
        """Call the function with each of `loads`; yield whether it returned, and its result or error."""
        for load in loads:
            try:
                outcome = (True, self._function()(wire.loads(load)))
                carried = wire.dumps(outcome)
            except BaseException as error:  # noqa: BLE001 - the driver decides what follows
                carried = wire.dumps((False, portable(error)))
            yield carried

    def _function(self) -> Callable[[Any], Any]:
        if self.name not in _kept:
            _kept[self.name] = wire.loads(self.pickled)
            while len(_kept) > _KEPT_MAX:
                _kept.popitem(last=False)
        _kept.move_to_end(self.name)
        return _kept[self.name]


def portable(error: BaseException) -> BaseException:
    """Return `error` in a form that can be sent to the driver, with the place where it was raised."""
    place = named(error)
    frames = "".join(traceback.format_tb(error.__traceback__))
    try:
        raised_elsewhere(error, place)
        error.add_note(f"raised on an executor:\n{frames}")
        found = wire.loads(wire.dumps(error))
        assert isinstance(found, type(error))
    except Exception:  # noqa: BLE001 - its pickling may raise anything
        return TailraceError(
            Kind.TASK_FAILED,
            f"run on an executor: {place}, an error that can't be pickled",
            "raise picklable errors in handlers and transformations, so that they can be reported completely",
        )
    return found


class Jobs(Generic[Load, Done]):
    """Calls a function on Spark executors. Any thread.

    :param session: returns the session; called for each job, because Spark may have been restarted.
    :param executor: its threads wait for jobs.
    :param at_once: most jobs at a time.
    :param shut: once it is set, calls that have not begun are cancelled.
    :param what: description for Spark's user interface: `shop, task 0: handler`.
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
        self._found: SparkSession | None = None

    def submit(self, load: Load) -> Future[Done]:
        """Schedule a call of the function with `load`.

        The future's exception is the function's error, or `SPARK_FAILED`; `GivenUpError` if `cancel` was
        called meanwhile. The future is cancelled if the call had not begun by then.
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
            _drop(future)  # after `cancel`, no job takes it
        else:
            self._go_on()
        return future

    def cancel(self) -> None:
        """Cancel running jobs, and begin no others. The outcomes of their tasks are discarded."""
        with self._lock:
            if self._cancelled:
                return
            self._cancelled = True
            waiting, running = list(self._waiting), self._running
            self._waiting.clear()
        for _, future in waiting:
            _drop(future)
        if running and self._found is not None:
            self._group.cancel(self._found)

    def _work(self) -> None:
        # On the pool: runs one job, then returns the thread to other work.
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
        except BaseException as error:  # noqa: BLE001 - it is set on the futures
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
        session = self._found = self._session()
        if self._cancelled:  # perhaps before there was a session
            raise GivenUpError
        tasks = min(len(loads), 2 * session.sparkContext.defaultParallelism)
        return collect(session, self._call, loads, tasks, self._group)


def _unpickled(outcome: bytes) -> tuple[bool, Any]:
    # Whether the function returned, and its result or error.
    try:
        is_done, found = wire.loads(outcome)
    except Exception as error:  # noqa: BLE001 - its unpickling may raise anything
        return False, TailraceError(
            Kind.TASK_FAILED,
            f"read the result of an executor: unpickling it raised {type(error).__name__}",
            "return and raise, in handlers and transformations, only objects of classes that can be imported "
            "both on the driver and on executors",
        )
    return is_done, found


def _drop(future: Future[Any]) -> None:
    # `concurrent.futures.wait` counts a cancelled future as done only once it was notified.
    future.cancel()
    future.set_running_or_notify_cancel()


def pickled(function: Callable[[Any], Any], what: str) -> bytes:
    """Return a function pickled for executors, including the objects that it refers to.

    :param what: for the message: `the handler`.
    :raises TailraceError: `CONFIG_INVALID` if it can't be pickled.
    """
    from pyspark import cloudpickle

    try:
        found: bytes = cloudpickle.dumps(function)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"create the engine: {what} can't be sent to executors, {type(error).__name__} was raised",
            "let it refer only to objects that can be pickled, and create locks, connections and sessions "
            "in its first call; the cause of this error names the object",
        ) from error
    return found
