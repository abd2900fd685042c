"""Threads that belong to an engine, a pool of them, bounded calls, the thread of callbacks, and the clock.

All of them are daemons: user code that hangs must not keep the process alive. While an engine works, its
own thread keeps the process alive; the time until that thread ends is bounded.
"""

from __future__ import annotations

import math
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

import structlog

from tailrace.engine.contracts import Callbacks
from tailrace.engine.failures import named
from tailrace.waits import join_all

P = ParamSpec("P")
T = TypeVar("T")

#: Longest delay before the main thread handles a signal that did not interrupt its wait, in seconds.
SIGNAL_DELAY_S_MAX = 0.5

_local = threading.local()


def owner() -> object | None:
    """Return the engine that the calling thread belongs to; None if there is none."""
    found: weakref.ref[object] | None = getattr(_local, "owner", None)
    return None if found is None else found()


def adopt(engine: object | None) -> None:
    """Make the calling thread belong to `engine`: it must not wait for that engine's end.

    The thread holds a weak reference: a thread that ends when the engine is collected would never end.
    """
    _local.owner = None if engine is None else weakref.ref(engine)


def belonging(function: Callable[[], None]) -> Callable[[], None]:
    """Return `function` for a new thread, which then belongs to the engine of the calling thread."""
    found = getattr(_local, "owner", None)

    def run() -> None:
        _local.owner = found
        function()

    return run


def wait_for(event: threading.Event, timeout_s: float | None) -> bool:
    """Wait until `event` is set, at most `timeout_s`; return whether it is.

    For the main thread. Python runs signal handlers only there, and a signal does not end an unlimited wait
    if it arrives between Python's last check and the wait, or on another thread: Ctrl-C would be lost.
    """
    deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while not event.wait(min(SIGNAL_DELAY_S_MAX, max(0.0, deadline_s - time.monotonic()))):
        if time.monotonic() >= deadline_s:
            return False
    return True


class Pool(Executor):
    """An executor with threads that belong to an engine.

    As `ThreadPoolExecutor`, but a function that hangs does not delay the end of the process. Callers of
    `submit` limit the number of waiting functions.
    """

    def __init__(self, threads: int, name: str, engine: object) -> None:
        self._threads_max = threads
        self._name = name
        self._engine = engine
        self._lock = threading.Lock()
        self.threads: list[threading.Thread] = []
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._futures: set[Future[Any]] = set()
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Schedule a call of `fn` on one of the threads.

        :raises RuntimeError: the pool was shut down.
        """
        future: Future[T] = Future()

        def work() -> None:
            self._futures.discard(future)
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - the future's reader gets it
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            if self._closed:
                raise RuntimeError("the engine is stopping: it takes no more work")
            self._futures.add(future)
            self._work.put(work)
            if len(self.threads) < self._threads_max:
                name = f"{self._name}-{len(self.threads)}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                self.threads.append(thread)
                thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work; with `cancel_futures`, cancel what has not begun."""
        with self._lock:
            closed, self._closed = self._closed, True
            waiting = list(self._futures) if cancel_futures else []
        for future in waiting:
            future.cancel()
        if not closed:
            for _ in self.threads:
                self._work.put(None)
        if wait:
            self.join(None)

    def join(self, timeout_s: float | None) -> bool:
        """Wait until all threads have ended, at most `timeout_s`; return whether they have."""
        return join_all(self.threads, timeout_s)

    def _run(self) -> None:
        adopt(self._engine)
        while (work := self._work.get()) is not None:
            work()
            del work  # the objects that it references are released while this thread waits


class BoundedCall:
    """A function that is called on its own thread, so that the wait for it can be limited."""

    def __init__(self, name: str, engine: object, function: Callable[[], None]) -> None:
        self._function = function
        self._engine = engine
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the function has ended, at most `timeout_s`; return whether it has.

        :raises BaseException: the function's error.
        """
        if not self._ended.wait(max(0.0, timeout_s)):
            return False
        self._thread.join(1.0)
        if self._error is not None:
            raise self._error
        return True

    def _run(self) -> None:
        adopt(self._engine)
        try:
            self._function()
        except BaseException as error:  # noqa: BLE001 - `wait` raises it
            self._error = error
        finally:
            self._ended.set()


log = structlog.get_logger(__name__)

#: Limit of waiting notifications while a callback hangs; further ones are only logged.
WAITING_MAX = 10_000


class CallbackDispatcher:
    """Calls callbacks one after another, in the order of the events. Any thread may notify.

    :param engine: the engine that the thread belongs to, so that a callback may close it.
    """

    def __init__(self, callbacks: Callbacks, name: str, engine: object) -> None:
        self._callbacks = callbacks
        self._engine = engine
        self._nothing = Callbacks()
        self._waiting: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue(WAITING_MAX)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._lock = threading.Lock()
        self._started = self._finished = False

    def notify(self, what: str, *arguments: Any) -> None:
        """Schedule a call of the callback `what`, if it was given. Returns at once."""
        if getattr(self._callbacks, what) is getattr(self._nothing, what):
            return
        with self._lock:
            if self._finished:
                return
            if not self._started:
                self._started = True
                self._thread.start()
        self._put((what, arguments))

    def finish(self, timeout_s: float) -> bool:
        """Wait until all callbacks were called, at most `timeout_s`; return whether they were.

        Called at the end: later notifications, from abandoned threads, are ignored.
        """
        with self._lock:
            self._finished = True
        if not self._started:
            return True
        self._put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _put(self, item: tuple[str, tuple[Any, ...]] | None) -> None:
        try:
            self._waiting.put_nowait(item)
        except queue.Full:
            log.warning("a callback hangs: later ones are not called", callback=item and item[0])

    def _run(self) -> None:
        adopt(self._engine)
        while (item := self._waiting.get()) is not None:
            what, arguments = item
            callback: Callable[..., None] = getattr(self._callbacks, what)
            try:
                callback(*arguments)
            except BaseException as error:  # noqa: BLE001 - raised by the user's callback
                log.warning("a callback failed", callback=what, error=named(error))


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        """Return a time in seconds that never decreases."""
        return time.monotonic()

    def time_us(self) -> int:
        """Return microseconds since 1970."""
        return time.time_ns() // 1000

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait for `event`, at most `timeout_s`; return whether it is set."""
        return event.wait(timeout_s)
