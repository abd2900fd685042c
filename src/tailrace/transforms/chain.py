"""A chain of transformations, each applied to all records or to those that a predicate chooses.

A chain can be pickled, and several threads can call it at once. `apply` takes one group and returns the
groups that its records became. Each record occurs at most once (an update that changed its key can become
two: `changed_keys`) and keeps its place, so that a place without a record is known to be dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tailrace.errors import Kind, RetriableError, StopEngine, TailraceError
from tailrace.records.group import Group, Places
from tailrace.transforms.contract import Predicate, Transformation
from tailrace.transforms.groups.rows import described


@dataclass(frozen=True, slots=True)
class Step:
    """A transformation with the predicate that chooses its records.

    :param name: for messages: its place in the list and its type.
    :param trusted: whether it is built in, so that the places of its records need no check.
    """

    name: str
    transformation: Transformation
    predicate: Predicate | None = None
    negate: bool = False
    trusted: bool = False

    def apply(self, group: Group) -> Iterator[Group]:
        """Yield the transformed records, and those that the predicate does not choose.

        :raises TailraceError: the transformation's own, or `TASK_FAILED` for any other exception.
        :raises RetriableError: if the transformation or the predicate raises it.
        :raises StopEngine: likewise.
        """
        chosen, rest = self._parted(group)
        if chosen is not None:
            yield from self._applied(chosen)
        if rest is not None:
            yield rest

    def _parted(self, group: Group) -> tuple[Group | None, Group | None]:
        if self.predicate is None:
            return group, None
        try:
            flags = np.asarray(self.predicate.matches(group))
        except (RetriableError, StopEngine):
            raise
        except Exception as error:
            raise self._failure(error, group, "choose records") from error
        if flags.shape != (len(group),) or flags.dtype != np.bool_:
            raise self._breach(group, f"its predicate returned {flags.dtype} of shape {flags.shape}")
        chosen = flags != self.negate
        if chosen.all():
            return group, None
        if not chosen.any():
            return None, group
        return group.take(np.flatnonzero(chosen)), group.take(np.flatnonzero(~chosen))

    def _applied(self, group: Group) -> list[Group]:
        try:
            found = [made for made in self.transformation.apply(group) if len(made)]
        except (RetriableError, StopEngine):
            raise
        except Exception as error:
            raise self._failure(error, group, "transform records") from error
        if not self.trusted:
            self._check(group, found)
        return found

    def _check(self, group: Group, found: Sequence[Group]) -> None:
        given = _in_order(group)
        places = np.concatenate([_in_order(made) for made in found]) if found else given[:0]
        if len(np.unique(places)) < len(places) or not np.isin(places, given).all():
            raise self._breach(group, "it returned a place twice, or one that its input does not have")
        if any((np.diff(_in_order(made)) <= 0).any() for made in found):
            raise self._breach(group, "it returned a group whose places are not in ascending order")

    def _failure(self, error: Exception, group: Group, what: str) -> TailraceError:
        where = {"transformation": self.name, "table": described(group)}
        if isinstance(error, TailraceError):
            return error.changed(where)
        return TailraceError(
            Kind.TASK_FAILED,
            f"{what}: {type(error).__name__} was raised",
            "the cause of this error has its message and traceback; a transformation that the "
            "configuration names can be restricted by a predicate to the records that it supports",
            where,
        )

    def _breach(self, group: Group, found: str) -> TailraceError:
        return TailraceError(
            Kind.TASK_FAILED,
            f"transform records: {found}",
            "tailrace.transforms.contract describes what a transformation may return",
            {"transformation": self.name, "table": described(group)},
        )


def _in_order(group: Group) -> Places:
    # Numbers that rise with the place, and differ where two records share one.
    return group.index if group.is_second is None else group.index * 2 + group.is_second


def close_of(transformation: object) -> Callable[[], None]:
    """Return the transformation's method `close`; a function that does nothing if it has none."""
    found: Callable[[], None] = getattr(transformation, "close", lambda: None)
    return found


@dataclass(frozen=True, slots=True)
class Chain:
    """A sequence of steps. Without steps it leaves records unchanged."""

    steps: tuple[Step, ...] = ()

    def __len__(self) -> int:
        return len(self.steps)

    def apply(self, group: Group) -> list[Group]:
        """Return the groups that a group's records become; none is empty. Any thread.

        :raises TailraceError: with the step and the table in its context; other errors as `Step.apply`.
        """
        groups: Iterable[Group] = [group] if len(group) else []
        for step in self.steps:
            groups = [made for found in groups for made in step.apply(found)]
        return list(groups)

    def close(self) -> None:
        """Close every transformation, even if one fails to close; then raise the first failure."""
        failures: list[Exception] = []
        for step in self.steps:
            try:
                close_of(step.transformation)()
            except Exception as error:  # noqa: BLE001 - raised below
                failures.append(error)
        if failures:
            raise failures[0]
