"""Random runs of engines whose records are processed on executors: nothing is lost and no resource leaks."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tailrace.engine.contracts import RetriableError, StopEngine
from tailrace.engine.lifecycle import State
from tailrace.errors import Kind, TailraceError
from tailrace.testing import LinesSource
from tests.support.engine_runs import SEEDS, Leaks
from tests.support.engines import Store, engine_of
from tests.support.wait import wait_until

pytestmark = pytest.mark.timeout(600)

LATE_S = 240.0

ENDS: list[BaseException | None] = [ValueError("no"), RetriableError(), StopEngine(), None, None]


def writing(path: Path, at: int, what: BaseException | None) -> Callable[[Any], None]:
    """Return a handler that writes numbers of lines to a file, wherever it runs, and fails once, at `at`.

    A line at which it stops the engine is written as well.
    """

    def handle(event: Any) -> None:
        number = event.record.after["number"]
        failing = what is not None and number >= at
        if failing:
            try:
                os.close(os.open(f"{path}.failed", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                failing = False
        if not failing or type(what).__name__ == "StopEngine":
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(file, f"{number}\n".encode())
            os.close(file)
        if failing:
            raise what  # type: ignore[misc]

    return handle


class World:
    """Lines, whose number grows, and what was written of them in all runs."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self.rng, self.store = folder, rng, Store()
        self.lines = self.lives = 0

    @property
    def done(self) -> set[int]:
        return {int(line) for path in self.folder.glob("*.lines") for line in path.read_text().split()}

    def live(self) -> None:
        """Run an engine that ends in one way or another."""
        rng, before = self.rng, self.lines
        self.lines += rng.randint(1, 40)
        close_s = rng.choice([None, None, 0.0, 0.2, 1.0])
        self._live(
            writing(self._file(), rng.randint(before, self.lines), rng.choice(ENDS)),
            rng.choice(["ordered", "unordered", "key"]),
            close_s,
            on_task_failure=rng.choice(["stop", "restart", "isolate"]),
            shutdown_timeout_ms=rng.choice([0, 1000]),
        )

    def end(self) -> None:
        """Process the rest without faults; then everything is done and committed."""
        assert self._live(writing(self._file(), 0, None), "ordered", None) is None
        assert self.done == set(range(1, self.lines + 1))
        assert self.store.line() == self.lines

    def _file(self) -> Path:
        self.lives += 1
        return self.folder / f"{self.lives}.lines"

    def _live(
        self,
        handler: Callable[[Any], None],
        order: str,
        close_s: float | None,
        *,
        on_task_failure: str = "stop",
        shutdown_timeout_ms: int = 60_000,
    ) -> BaseException | None:
        engine = engine_of(
            LinesSource(self.lines, batch=7, ends=close_s is None),
            handler,
            offsets=self.store,
            converter="json",
            options={
                "on_task_failure": on_task_failure,
                "record_processing": {
                    "runs_on": "spark",
                    "order": order,
                    "shutdown_timeout_ms": shutdown_timeout_ms,
                },
            },
        )
        timer = threading.Timer(close_s or 0.0, engine.close)
        if close_s is not None:
            timer.start()
        try:
            engine.run()
        except TailraceError as error:
            assert error is engine.error or error.kind is Kind.ENGINE_MISUSED  # noqa: PT017 - it is told
        if close_s is not None:
            timer.join(LATE_S)
        assert engine.state is State.STOPPED
        assert set(range(1, self.store.line() + 1)) <= self.done, "committed, but not processed"
        return engine.error


def lives(spark: Any, folder: Path, count: int, seed: int) -> None:
    world = World(folder, random.Random(seed))
    world.live()  # Spark's own threads and files exist after this
    world.end()
    leaks = Leaks()
    for _ in range(count):
        world.live()
    world.end()
    tracker = spark.sparkContext.statusTracker()
    wait_until(lambda: not tracker.getActiveJobsIds(), LATE_S, "the end of all jobs")
    leaks.check()


@pytest.mark.ci
@pytest.mark.parametrize("seed", SEEDS)
def test_random_runs_on_spark_leak_no_job_thread_or_file(spark: Any, tmp_path: Path, seed: int) -> None:
    lives(spark, tmp_path, 6, seed)


@pytest.mark.torture
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_hundred_random_runs_on_spark_leak_no_job_thread_or_file(
    spark: Any, tmp_path: Path, seed: int
) -> None:
    lives(spark, tmp_path, 100, seed)
