"""What a task of Vitess knows of a shard beside its state."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from tailrace.sources.vitess.connection.vtgate import Row


@dataclass(slots=True)
class ShardProgress:
    """What is known of one shard beside its state.

    :ivar moved_s: when its stream last brought something of its own.
    :ivar probed_s: when it was last asked what it has, and `asked_us`, by the clock.
    :ivar whole_until_us: everything that was committed before is here.
    """

    moved_s: float = field(default_factory=time.monotonic)
    probed_s: float = field(default_factory=time.monotonic)
    asked_us: int = 0
    whole_until_us: int = 0


@dataclass(frozen=True, slots=True)
class ShardProbe:
    """A question to a shard, what it has, that is not answered yet.

    :param of: the type of the tablet that is asked.
    """

    attempt: int
    of: str
    serves: bool
    answer: Future[list[Row]]
