"""The comparison finds what it is for: each fault here is planted into a correct history."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tailrace.decode import changes as decoding
from tailrace.decode import kernel
from tailrace.decode.tuples import Tuples, find_tuples
from tailrace.errors import TailraceError
from tailrace.sinks.delta import evolution
from tailrace.sinks.delta.mirror import files as mirror_files
from tailrace.sinks.delta.mirror import net_changes
from tailrace.sinks.delta.mirror import sink as mirror
from tailrace.sinks.delta.shapes import ShapeStep
from tests.support.differential.ddl import DDL
from tests.support.differential.feeding import Feeding
from tests.support.differential.history import Change, read_log
from tests.support.differential.merging import without_spark
from tests.support.differential.story import Story
from tests.support.postgres import Database

History = list[Change]


@pytest.fixture
def story(pg: Database, tmp_path: Path) -> Iterator[Story]:
    with Story(4, pg, tmp_path, DDL) as told:
        told.chapters(1, 150)
        assert not told.problems
        yield told


def some(history: History, op: str, rng: random.Random) -> int:
    """Return the index of a change of this kind well inside the history."""
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


def test_each_fault_of_a_history_is_found(story: Story) -> None:
    history = read_log(story.log)
    unnoticed = [
        (plant.__name__, seed)
        for plant in PLANTS
        for seed in range(5)
        if not story.compare(plant(history, random.Random(seed)))
    ]
    assert not unnoticed


def test_a_decoder_that_takes_unchanged_for_null_is_found(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(*arguments: Any) -> Tuples:
        tuples = find_tuples(*arguments)
        np.putmask(tuples.current.kind, tuples.current.kind == kernel.UNCHANGED, kernel.NULL)
        return tuples

    monkeypatch.setattr(decoding, "find_tuples", forgetful)
    assert any(": missing: " in problem for problem in story.compare(read_log(story.log)))


# ---------------------------------------------------------------------- in a mirror


def take_unchanged_for_null(patch: pytest.MonkeyPatch) -> None:
    def forgetful(*arguments: Any) -> pa.Table:
        events = net_changes.events_of(*arguments)
        at = events.column_names.index(net_changes.UNCHANGED)
        none = pa.array([[]] * len(events), events.schema.field(at).type)
        return events.set_column(at, events.schema.field(at), none)

    patch.setattr(mirror_files, "events_of", forgetful)


def lose_a_delete_that_meets_an_insert(patch: pytest.MonkeyPatch) -> None:
    def lossy(events: pa.Table, key: tuple[str, ...], *rest: Any) -> pa.Table:
        keys = [tuple(row.values()) for row in events.select(key).to_pylist()]
        upserts = events[net_changes.UPSERT].to_pylist()
        inserted = {each for each, upsert in zip(keys, upserts, strict=True) if upsert}
        kept = [upsert or each not in inserted for each, upsert in zip(keys, upserts, strict=True)]
        steps = [step[np.array(kept, np.bool_)] for step in rest]
        return net_changes.net(events.filter(pa.array(kept, pa.bool_())), key, *steps)

    patch.setattr(mirror_files, "net", lossy)


def fill_a_renamed_column_from_another(patch: pytest.MonkeyPatch) -> None:
    def confused(have: Any, *arguments: Any, **more: Any) -> list[ShapeStep]:
        kinds = {column.name: column.kind for column in have}
        return [
            step
            if step.source in (None, step.field.name)
            else dataclasses.replace(
                step,
                source=next(
                    (
                        name
                        for name, kind in kinds.items()
                        if name != step.source and kind == kinds[step.source]
                    ),
                    None,
                ),
            )
            for step in evolution.mirror_steps(have, *arguments, **more)
        ]

    patch.setattr(mirror, "mirror_steps", confused)


def forget_which_row_a_key_had(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(net_changes._Lineages, "follow", lambda self, *_: self._ids)


MIRROR_PLANTS = (
    take_unchanged_for_null, lose_a_delete_that_meets_an_insert, fill_a_renamed_column_from_another,
    forget_which_row_a_key_had,
)  # fmt: skip


def finds(plant: Callable[[pytest.MonkeyPatch], None] | None, log: Path, lake: Path) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        without_spark(patch)
        if plant is not None:
            plant(patch)
        try:
            return bool(Feeding(log, lake, random.Random(1), 300, ("mirror",)).fill())
        except TailraceError:  # reported by the mirror itself
            return True


@pytest.mark.ci
def test_each_fault_of_a_mirror_is_found(pg: Database, tmp_path: Path) -> None:
    with Story(101, pg, tmp_path, ("rename_column", "swap_columns"), for_lakes=True) as told:
        told.chapters(1, 120)
    assert not told.problems
    assert not finds(None, told.log, tmp_path / "whole")
    assert [plant for plant in MIRROR_PLANTS if not finds(plant, told.log, tmp_path / plant.__name__)] == []
