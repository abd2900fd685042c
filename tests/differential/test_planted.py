"""The differ notices what it is there for: each fault here is planted into a history that is whole."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from differential.ddl import DDL
from differential.history import Change, read_log
from differential.story import Story
from fix_postgres import Database
from tailrace.decode import changes as decoding
from tailrace.decode import kernel
from tailrace.decode.tuples import Tuples, find_tuples

History = list[Change]


@pytest.fixture
def story(pg: Database, tmp_path: Path) -> Iterator[Story]:
    with Story(4, pg, tmp_path, DDL) as told:
        told.chapters(1, 150)
        assert not told.problems
        yield told


def some(history: History, op: str, rng: random.Random) -> int:
    """Return the place of a change of this sort that lies well inside the history."""
    found = [at for at, change in enumerate(history) if change.op == op and change.message is None]
    return rng.choice(found[len(found) // 4 :])


def lose_a_change(history: History, rng: random.Random) -> History:
    at = some(history, "c", rng)
    return history[:at] + history[at + 1 :]


def lose_an_ordinal(history: History, rng: random.Random) -> History:
    at = some(history, "u", rng)
    lost = history[at]
    return [
        dataclasses.replace(change, ordinal=change.ordinal + 1)
        if change.commit_lsn == lost.commit_lsn and change.ordinal >= lost.ordinal
        else change
        for change in history
    ]


def double_a_change(history: History, rng: random.Random) -> History:
    at = some(history, "c", rng)
    return [*history[: at + 1], *history[at:]]


def lose_a_transaction(history: History, rng: random.Random) -> History:
    gone = history[some(history, "u", rng)].commit_lsn
    return [change for change in history if change.commit_lsn != gone]


def double_a_transaction(history: History, rng: random.Random) -> History:
    again = history[some(history, "u", rng)].commit_lsn
    last = max(at for at, change in enumerate(history) if change.commit_lsn == again)
    copy = [change for change in history if change.commit_lsn == again]
    return [*history[: last + 1], *copy, *history[last + 1 :]]


def swap_two_changes(history: History, rng: random.Random) -> History:
    at = some(history, "u", rng)
    one, two = history[at - 1], history[at]
    return [*history[: at - 1], two, one, *history[at + 1 :]]


def lose_the_snapshot_of_a_row(history: History, rng: random.Random) -> History:
    at = some(history, "r", rng)
    return history[:at] + history[at + 1 :]


def has_moved(change: Change) -> bool:
    old, new = change.before or {}, change.after or {}
    return change.op == "u" and any(old[name] != new.get(name, old[name]) for name in old)


def forget_the_old_key(history: History, rng: random.Random) -> History:
    at = rng.choice([at for at, change in enumerate(history) if has_moved(change)])
    return [*history[:at], dataclasses.replace(history[at], before=None), *history[at + 1 :]]


PLANTS = (
    lose_a_change, lose_an_ordinal, double_a_change, lose_a_transaction, double_a_transaction,
    swap_two_changes, lose_the_snapshot_of_a_row, forget_the_old_key,
)  # fmt: skip


def test_each_fault_of_a_history_is_noticed(story: Story) -> None:
    history = read_log(story.log)
    unnoticed = [
        (plant.__name__, seed)
        for plant in PLANTS
        for seed in range(5)
        if not story.compare(plant(history, random.Random(seed)))
    ]
    assert not unnoticed


def test_a_decoder_that_takes_unchanged_for_null_is_noticed(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(*arguments: Any) -> Tuples:
        tuples = find_tuples(*arguments)
        np.putmask(tuples.current.kind, tuples.current.kind == kernel.UNCHANGED, kernel.NULL)
        return tuples

    monkeypatch.setattr(decoding, "find_tuples", forgetful)
    assert any(": missing: " in problem for problem in story.compare(read_log(story.log)))
