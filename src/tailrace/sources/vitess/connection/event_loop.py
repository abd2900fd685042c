"""The event loop for queries to vtgate: one loop, on a thread of its own, for the whole process.

gRPC's asyncio works well with one loop at a time. Queries to a thousand shards can wait on it at once.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_making = threading.Lock()


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Run `work` on the loop; return at once a future of its result. Any thread but the loop's."""
    return asyncio.run_coroutine_threadsafe(work, event_loop())


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the running loop."""
    with _making:  # two threads that call it first, at the same time, get the same loop
        return _loop_of(os.getpid())


@functools.cache
def _loop_of(_process: int) -> asyncio.AbstractEventLoop:
    # By process: a forked process doesn't have its parent's threads.
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="tailrace-grpc", daemon=True).start()
    return loop
