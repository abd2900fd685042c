"""Which offset may be committed after marks in any order, compared with a model that checks every record."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tailrace.engine.offsets.tracker import BATCHES_MAX, Tracker
from tailrace.errors import TailraceError
from tests.support.examples import examples


class Counted:
    """Offsets of a batch that begins at `first`."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {"at": self.first + place + 1}


@dataclass
class Naive:
    """A batch as the model sees it."""

    first: int
    ends: list[bool] | None
    end: dict[str, Any] | None
    done: list[bool]
    is_done: bool = False
    is_within: bool = False
    own: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return self.is_done or (bool(self.done) and all(self.done))

    def offset(self, count: int) -> dict[str, Any] | None:
        if count - 1 in self.own:
            return self.own[count - 1]
        if count == len(self.done) and self.end is not None:
            return self.end
        return {"at": self.first + count} if count else None


class Marks(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tracker = Tracker()
        self.batches: list[Naive] = []
        self.committed: tuple[int, int] = (0, 0)
        self.is_within = False  # a transaction is open after this batch

    @rule(size=st.integers(0, 9), ends=st.booleans(), end=st.booleans(), data=st.data())
    def begin(self, size: int, ends: bool, end: bool, data: st.DataObject) -> None:
        first = sum(len(b.done) for b in self.batches)
        marks = data.draw(st.lists(st.booleans(), min_size=size, max_size=size)) if ends else None
        last = {"end": len(self.batches)} if end else None
        self.tracker.begin(
            len(self.batches),
            size,
            Counted(first),
            last,
            None if marks is None else np.array(marks, np.bool_),
        )
        if size or marks is None:
            self.is_within = marks is not None and not marks[-1]
        is_within = not size and self.is_within
        self.batches.append(Naive(first, marks, last, [False] * size, is_within=is_within))

    @rule()
    def note(self) -> None:
        offset = {"noted": len(self.batches)}
        self.tracker.note(len(self.batches), offset)
        waits = not all(batch.is_whole for batch in self.batches)
        if not (waits and self.batches[-1].is_done and not self.batches[-1].done):
            self.batches.append(Naive(0, None, None, [], is_done=True))
        self.batches[-1].end = offset
        self.batches[-1].is_within = self.is_within

    def _any(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, max(0, len(self.batches) - 1)))

    @rule(data=st.data(), verbatim=st.booleans())
    def mark(self, data: st.DataObject, verbatim: bool) -> None:
        if not self.batches or not self.batches[number := self._any(data)].done:
            return
        found = self.batches[number]
        place = data.draw(st.integers(0, len(found.done) - 1))
        offset = {"own": place} if verbatim else None
        if verbatim and all(all(b.done) or b.is_done for b in self.batches[: number + 1]):
            return  # it is forgotten, and offsets that come so late are ignored
        self.tracker.mark(number, place, offset)
        found.done[place] = True
        if offset is not None:
            found.own[place] = offset

    @rule(data=st.data())
    def mark_many(self, data: st.DataObject) -> None:
        if not self.batches or not self.batches[number := self._any(data)].done:
            return
        found = self.batches[number]
        places = data.draw(st.sets(st.integers(0, len(found.done) - 1)))
        self.tracker.mark_places(number, np.array(sorted(places), np.int64))
        for place in places:
            found.done[place] = True

    @rule(data=st.data())
    def mark_batch(self, data: st.DataObject) -> None:
        if self.batches:
            number = self._any(data)
            self.tracker.mark_batch(number)
            self.batches[number].is_done = True

    @rule(at_end=st.booleans())
    def commit(self, at_end: bool) -> None:
        self.tracker.advance()
        point = self.tracker.transaction_end if at_end else self.tracker.furthest
        if point is not None:
            self.tracker.committed(point)
            self.committed = (point.records, point.batches)

    @invariant()
    def points_are_those_of_the_model(self) -> None:
        self.tracker.advance()
        furthest: tuple[int, int, Any] | None = None
        ending: tuple[int, int, Any] | None = None
        records = 0
        for batches, found in enumerate(self.batches):
            count = (
                len(found.done)
                if found.is_done
                else next((k for k, d in enumerate(found.done) if not d), len(found.done))
            )
            whole = found.is_done or (bool(found.done) and count == len(found.done))
            for after in range(0 if whole and not found.done else 1, count + 1):
                offset = found.offset(after)
                if offset is None:
                    continue
                point = (records + after, batches + (after == len(found.done)), offset)
                furthest = point
                if not found.is_within and (found.ends is None or not found.done or found.ends[after - 1]):
                    ending = point
            records += count
            if not whole:
                break
        for mine, theirs in ((furthest, self.tracker.furthest), (ending, self.tracker.transaction_end)):
            if mine is None or mine[:2] <= self.committed:
                assert theirs is None
            else:
                assert theirs is not None
                assert (theirs.records, theirs.batches, theirs.offset) == mine
        assert self.tracker.processed == records


TestMarks = Marks.TestCase
TestMarks.settings = settings(examples(150), stateful_step_count=40)


def test_a_million_records_marked_out_of_order_take_a_byte_each():
    tracker = Tracker()
    size = 1_000_000
    tracker.begin(1, size, Counted(0))
    for place in range(size - 1, size - 1000, -1):
        tracker.mark(1, place)
    tracker.advance()
    assert tracker.furthest is None
    tracker.mark_places(1, np.arange(size - 1000 + 1))
    assert tracker.advance() == [1]
    assert tracker.furthest is not None
    assert tracker.furthest.offset == {"at": size}


def test_invalid_positions_and_batches_that_begin_twice_are_refused():
    tracker = Tracker()
    tracker.begin(1, 2, Counted(0))
    with pytest.raises(IndexError):
        tracker.mark(1, 2)
    with pytest.raises(ValueError, match="already begun"):
        tracker.begin(1, 2, Counted(0))


def test_the_number_of_unmarked_batches_is_limited():
    tracker = Tracker()
    for number in range(BATCHES_MAX):
        tracker.begin(number, 1, Counted(number))
    with pytest.raises(TailraceError, match="not marked as processed"):
        tracker.begin(BATCHES_MAX, 1, Counted(0))


def test_a_batch_without_records_does_not_end_the_transaction_it_is_in():
    tracker = Tracker()
    tracker.begin(1, 2, [{"at": 1}, {"at": 2}], transaction_ends=np.array([True, False]))
    tracker.begin(2, 0, (), {"at": 3}, np.empty(0, np.bool_))
    for number in (1, 2):
        tracker.mark_batch(number)
    tracker.advance()
    assert tracker.furthest is not None
    assert tracker.transaction_end is not None
    assert (tracker.furthest.offset, tracker.transaction_end.offset) == ({"at": 3}, {"at": 1})
    tracker.begin(3, 0, (), {"at": 4})  # it has the end of the transaction
    tracker.mark_batch(3)
    tracker.advance()
    assert tracker.transaction_end is not None
    assert tracker.transaction_end.offset == {"at": 4}
