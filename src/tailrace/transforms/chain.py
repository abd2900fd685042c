"""Transformations one after another, each for all records or for those that a predicate chooses.

A chain is a value: it may be pickled, and applied by several threads at once. What goes in at
`apply` is one group; what comes out are the groups that its records have become, each record at
most once (an update that changed its key: `changed_keys`) and with its place, so that what is missing is
known to be dropped.
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
    """A transformation with what chooses its records.

    :param name: for messages: its place in the list and what it is.
    :param trusted: it is one of our own, whose places need no check.
    """

    name: str
    transformation: Transformation
    predicate: Predicate | None = None
    negate: bool = False
    trusted: bool = False

    def apply(self, group: Group) -> Iterator[Group]:
        """Yield what becomes of the records, those that are not chosen included.

        :raises TailraceError: the transformation's own, or `TASK_FAILED` for what else it raises.
        :raises RetriableError: of the transformation or the predicate.
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
            flags = self.predicate.matches(group)
        except (RetriableError, StopEngine):
            raise
        except Exception as error:
            raise self._failure(error, group, "choose records") from error
        if flags.shape != (len(group),) or flags.dtype != np.bool_:
            raise self._breach(group, f"its predicate gave {flags.dtype} of {flags.shape}")
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
            raise self._breach(group, "it gave a place twice, or one that it was not given")
        if any((np.diff(_in_order(made)) <= 0).any() for made in found):
            raise self._breach(group, "it gave a group whose places don't rise")

    def _failure(self, error: Exception, group: Group, what: str) -> TailraceError:
        where = {"transformation": self.name, "table": described(group)}
        if isinstance(error, TailraceError):
            return TailraceError(error.kind, error.message, error.hint, {**error.context, **where})
        return TailraceError(
            Kind.TASK_FAILED,
            f"{what}: {type(error).__name__} was raised",
            "the cause of this error has its words and its trace; records that it can't take can be kept "
            "from it by a predicate, if it is named in the configuration",
            where,
        )

    def _breach(self, group: Group, found: str) -> TailraceError:
        return TailraceError(
            Kind.TASK_FAILED,
            f"transform records: {found}",
            "tailrace.transforms.contract says what a transformation may do",
            {"transformation": self.name, "table": described(group)},
        )


def _in_order(group: Group) -> Places:
    # The places, told apart where records share one.
    return group.index if group.is_second is None else group.index * 2 + group.is_second


def close_of(transformation: object) -> Callable[[], None]:
    """Return the method `close`, which one that holds nothing need not have."""
    found: Callable[[], None] = getattr(transformation, "close", lambda: None)
    return found


@dataclass(frozen=True, slots=True)
class Chain:
    """Steps in their order. Without any, records stay as they are."""

    steps: tuple[Step, ...] = ()

    def __len__(self) -> int:
        return len(self.steps)

    def apply(self, group: Group) -> list[Group]:
        """Return what becomes of a group's records; no group is empty. Any thread.

        :raises TailraceError: with the step and the table in its context; others as `Step.apply`.
        """
        groups: Iterable[Group] = [group] if len(group) else []
        for step in self.steps:
            groups = [made for found in groups for made in step.apply(found)]
        return list(groups)

    def close(self) -> None:
        """Close every transformation, also when one of them fails; the first failure is raised."""
        failures: list[Exception] = []
        for step in self.steps:
            try:
                close_of(step.transformation)()
            except Exception as error:  # noqa: BLE001 - raised below
                failures.append(error)
        if failures:
            raise failures[0]
