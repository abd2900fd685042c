"""The thread on which vtgate is asked whatever is no stream: one event loop for the whole process.

gRPC's asyncio serves one loop at a time well. Questions to a thousand shards wait on it at once.
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
    """Have the loop run `work`; return at once with what its result will be in. Any thread but the loop's."""
    return asyncio.run_coroutine_threadsafe(work, event_loop())


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop, which runs."""
    with _making:  # two threads that ask first, at once, get the same one
        return _loop_of(os.getpid())


@functools.cache
def _loop_of(_process: int) -> asyncio.AbstractEventLoop:
    # By process: one that was forked has no thread of its parent's.
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="tailrace-grpc", daemon=True).start()
    return loop
