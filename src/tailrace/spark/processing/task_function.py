"""Handing records over to a handler on an executor: what goes there, and what comes back.

Everything here runs on the executor, as a function of what is given: what failed is returned, and when it
is tried again is decided on the driver.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tailrace.backoff import is_retriable
from tailrace.engine.contracts import StopEngine
from tailrace.engine.processing.handlers import check_done
from tailrace.engine.processing.ordering_keys import in_order
from tailrace.engine.processing.stage import ReadyBatch, Stage, StagedGroup
from tailrace.records.batch import Batch, Partition
from tailrace.records.group import Group
from tailrace.spark.processing.jobs import portable


@dataclass(frozen=True, slots=True, eq=False)
class Portion:
    """Records of one batch that one Spark task hands over, in their order.

    :param groups: as they are staged; of a portion that is staged on the executor, as polled.
    :param begun: by place: how many of the record's events the handler has had.
    """

    partition: Partition
    groups: Sequence[Group | StagedGroup]
    begun: Mapping[int, int]


@dataclass(slots=True)
class ChunkOutcome:
    """What became of a portion. What is not in `left` is processed, or was dropped.

    :param left: by place, rising: how many of the record's events the handler has had.
    :param again: by place: errors of records that are tried again, each of them left.
    :param final: place and error of the record after which nothing more was handed over.
    :param wants_end: the handler raised `StopEngine`.
    :param delivered: how many records were handed over.
    """

    left: dict[int, int] = field(default_factory=dict)
    again: dict[int, BaseException] = field(default_factory=dict)
    final: tuple[int, BaseException] | None = None
    wants_end: bool = False
    delivered: int = 0

    @property
    def goes_on(self) -> bool:
        """Whether the handler may be called for what comes after."""
        return self.final is None and not self.wants_end


@dataclass(frozen=True, slots=True)
class TaskFunction:
    """Hands portions over, one after another.

    :param stage: what is done before; None: portions are staged.
    """

    stage: Stage | None
    handler: Callable[[Any], object]

    def __call__(self, portions: Sequence[Portion]) -> list[ChunkOutcome]:
        """Return what became of each portion.

        A record that fails and is to be tried again holds up those after it that share an ordering key.
        :raises BaseException: what a transformation or the converter raised, before anything was handed over.
        """
        staged = [self._staged(portion) for portion in portions]
        held: set[int] = set()
        outcomes: list[ChunkOutcome] = []
        goes_on = True
        for portion, groups in zip(portions, staged, strict=True):
            found = ChunkOutcome()
            for record in _records(portion, groups):
                if not (goes_on and found.goes_on and held.isdisjoint(record.keys)):
                    found.left[record.place] = record.begun
                elif (begun := self._call(record, found)) < len(record.given):
                    found.left[record.place] = begun
                else:
                    found.delivered += 1
                    continue
                held.update(record.keys)
            goes_on = goes_on and found.goes_on
            outcomes.append(found)
        return outcomes

    def _staged(self, portion: Portion) -> Sequence[StagedGroup]:
        if self.stage is None:
            return [one for one in portion.groups if isinstance(one, StagedGroup)]
        return self.stage([one for one in portion.groups if isinstance(one, Group)])

    def _call(self, record: _Record, found: ChunkOutcome) -> int:
        # Returns how many of the record's events the handler has had.
        for event in range(record.begun, len(record.given)):
            try:
                if (returned := self.handler(record.given[event])) is not None:
                    check_done(returned)
            except StopEngine:
                found.wants_end = True
                return event + 1
            except BaseException as error:  # noqa: BLE001 - tried again, or the task's thread raises it
                if is_retriable(error):
                    found.again[record.place] = portable(error)
                else:
                    found.final = (record.place, portable(error))
                return event
        return len(record.given)


class _Record(NamedTuple):
    # What a handler gets of it, how much of that it had, and where it stands.
    place: int
    given: Sequence[Any]
    begun: int
    keys: tuple[int, ...]


def _records(portion: Portion, staged: Sequence[StagedGroup]) -> Iterator[_Record]:
    ready = ReadyBatch.of(Batch(portion.partition, (), 0, ()), staged)
    stands: Iterator[tuple[int, ...]] = itertools.repeat(())
    if keys := ready.ordering_keys:
        own, other, _ = in_order(keys, ready.batch.rows)
        stands = zip(own.tolist(), other.tolist(), strict=True)
    for (place, given), own_keys in zip(ready.by_record(), stands, strict=False):
        yield _Record(place, given, portion.begun.get(place, 0), own_keys)
