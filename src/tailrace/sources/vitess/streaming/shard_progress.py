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
    :ivar stalls: so often in a row its stream was opened again because it stood still.
    """

    moved_s: float = field(default_factory=time.monotonic)
    probed_s: float = field(default_factory=time.monotonic)
    asked_us: int = 0
    whole_until_us: int = 0
    stalls: int = 0

    def move(self, *, is_further: bool) -> None:
        """Note that its stream brought something of its own.

        :param is_further: a row or a transaction; not just the position at which a copy begins once more.
        """
        self.moved_s = time.monotonic()
        if is_further:
            self.stalls = 0


@dataclass(frozen=True, slots=True)
class ShardProbe:
    """A question to a shard, what it has, that is not answered yet.

    :param of: the type of the tablet that is asked.
    """

    attempt: int
    of: str
    serves: bool
    answer: Future[list[Row]]
