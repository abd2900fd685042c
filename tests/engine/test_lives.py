"""Random runs of engines: whatever goes wrong, no record is lost or skipped and no resource leaks."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tailrace.engine.engine import Engine
from tailrace.engine.offsets.committer import OffsetCommitter
from tailrace.engine.processing.dispatcher import Dispatcher
from tailrace.testing.source import LinesTask
from tests.support import engine_runs
from tests.support.engine_runs import PEACE, SEEDS, Leaks, World, script_of
from tests.support.examples import examples


class Lives(RuleBasedStateMachine):
    """Engines that run one after another, over a source that gets more lines."""

    def __init__(self):
        super().__init__()
        self.world = World()
        self.leaks = Leaks()

    @initialize(counts=st.lists(st.integers(0, 30), min_size=6, max_size=6))
    def begin(self, counts):
        for partition, count in enumerate(counts):
            self.world.append(partition, count)

    @rule(partition=st.integers(0, 5), count=st.integers(1, 40))
    def append(self, partition, count):
        self.world.append(partition, count)

    @rule(rng=st.randoms(use_true_random=False))
    def live(self, rng):
        self.world.live(script_of(rng))

    @rule()
    def live_without_faults(self):
        self.world.live(PEACE)

    def teardown(self):
        self.world.end()
        self.leaks.check()


TestLives = Lives.TestCase
TestLives.settings = settings(examples(25), stateful_step_count=8)


def lives(count, seed):
    """Run so many engines. The name of the test has the seed: TAILRACE_SEEDS=<seed> repeats it."""
    leaks, world, rng = Leaks(), World(), random.Random(seed)
    for _ in range(count):
        for _ in range(rng.choice([0, 1, 3])):
            world.append(rng.randrange(6), rng.randint(1, 30))
        world.live(script_of(rng))
    world.end()
    leaks.check()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.slow
def test_random_runs_leak_nothing(seed):
    lives(60, seed)


@pytest.mark.ci
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_thousand_random_runs_leak_nothing(seed):
    lives(1000, seed)


# ------------------------------------------------------------------ planted bugs, which the rules must find


def skips_a_batch(monkeypatch):
    """Every seventh batch is marked as processed without being delivered."""
    count, take = itertools.count(1), OffsetCommitter.take

    def planted(self, batch):
        take(self, batch)
        if next(count) % 7 == 0:
            self.mark_processed(batch)

    monkeypatch.setattr(OffsetCommitter, "take", planted)


def drops_a_failed_batch(monkeypatch):
    """Every seventh batch is lost, as one whose delivery failed."""
    process = Dispatcher.process
    count = itertools.count(1)

    def planted(self, batch):
        if next(count) % 7:
            process(self, batch)

    monkeypatch.setattr(Dispatcher, "process", planted)


def does_not_stop_a_task_whose_start_failed(monkeypatch):
    stop = LinesTask.stop

    def planted(self):
        if self._given:
            stop(self)

    monkeypatch.setattr(LinesTask, "stop", planted)


def _many_lives():
    for seed in range(7, 12):  # threads also decide whether a run meets a bug
        lives(60, seed)


def reports_success_after_a_failure(monkeypatch):
    monkeypatch.setattr(Engine, "_raise_failure", lambda _: None)
    monkeypatch.setattr(Engine, "error", None)


@pytest.mark.parametrize(
    "bug",
    [
        skips_a_batch,
        drops_a_failed_batch,
        does_not_stop_a_task_whose_start_failed,
        reports_success_after_a_failure,
    ],
)
@pytest.mark.slow
def test_a_planted_bug_is_found(monkeypatch, bug):
    bug(monkeypatch)
    monkeypatch.setattr(engine_runs, "FAR_S", 5.0)
    with pytest.raises(AssertionError):
        _many_lives()
