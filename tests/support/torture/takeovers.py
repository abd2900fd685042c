"""One engine takes a pipeline over from another that is stopped and goes on later.

On one machine the locks of the log and of its directory keep a second engine out for as long as the first one
lives. If a whole machine stops, the locks of a shared file system expire, and the server drops its
connection: the harness causes both. What must protect the data then is the epoch of the log and that of the
producer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import psycopg

from tests.support.torture.harness import Life, Round
from tests.support.wait import wait_until

_MOVES_TIMEOUT_S = 180.0
#: How an engine that was taken over reports it: whichever check it reaches first.
WORDS = ("sink_preempted", "log_fenced")


@dataclass
class Relay:
    """Engines that follow each other on one pipeline, each while the one before is stopped."""

    round: Round
    lives: list[Life] = field(default_factory=list)

    def begin(self) -> None:
        """Start the first engine, and wait until it has committed something."""
        self._start()

    def hand_over(self) -> list[str]:
        """Let another engine take over at a random moment; return the problems of the old one's end."""
        old = self.lives[-1]
        time.sleep(self.round.random.uniform(0, 0.5))
        old.pause()
        self._expire()
        self._start()
        old.wake()
        return _judged(old)

    def _start(self) -> None:
        before = self.offset()
        number = len(self.lives)
        self.lives.append(
            self.round.live(until_caught_up=False, output=self.round.root / f"engine-{number}.out")
        )
        life = self.lives[-1]

        def has_moved() -> bool:
            assert not life.is_over, f"engine {number} ended:\n{life.last_words()}"
            return (self.offset() or 0) > (before or 0)

        wait_until(has_moved, _MOVES_TIMEOUT_S, f"engine {number} to commit")

    def offset(self) -> int | None:
        """Return the log offset that was committed last."""
        assert self.round.topics is not None
        return self.round.topics.offset()

    def _expire(self) -> None:
        (of_log,) = self.round.log.glob("tasks/*/lock")
        for lock in (self.round.log / "lock", of_log):
            lock.unlink()
        with psycopg.connect(self.round.database.dsn, autocommit=True) as connection:
            gone = "select count(*) = 0 from pg_replication_slots where active"
            connection.execute(
                "select pg_terminate_backend(active_pid) from pg_replication_slots where active"
            )
            wait_until(lambda: connection.execute(gone).fetchone() == (True,), 60, "the slot to be free")


def _judged(old: Life) -> list[str]:
    status, said = old.wait(), old.last_words()
    found = [] if status == 1 else [f"taken over, and ended with status {status}: {said}"]
    if not any(word in said for word in WORDS):
        found.append(f"taken over, and did not say so: {said}")
    return found
