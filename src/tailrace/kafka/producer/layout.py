"""Several producers that write one task: how the task is taken, shared out and shared out again.

Records in the offsets topic say how far the task is:

- the *head*, the task's own offset: everything before its `log_offset` is written. From there on either the
  task's own producer writes (`producers` 0), or so many *members* do, each the share of the records that
  their keys give it (`shares`). `layout` names this way of sharing out, `lease` who took the task last.
- an offset for each member, committed with its records: how far its share is. It counts only if it is of the
  layout in force; what was left by another number of producers does not.

Only the task's own producer writes the head, and who takes a task with transactions writes one with a
lease of its own before anything else, also where no members are: who is fenced later finds another lease if
another engine has taken the task, and its own if the cluster has ended a transaction that was open for too
long. Two procedures do all of it; they are generators of steps,
the caller carries a step out and sends its result back. Pure: no clock, thread or client.

`taking` is for who begins, the driver: (1) it opens the own producer, which fences that of the driver before;
(2) it writes the head with a new lease; (3) it fences each member's owner, and then reads how far each member
is: an offset can't be read while a transaction of another member is open before it. Only then it knows where
to go on; and if all members are equally far, it may begin another layout. `sharing` is for who writes a
share, an executor: (a) it opens the member's producer; (b) it reads the head, and stops unless the lease is
still that which it was sent with; (c) it writes from where the member is.

Why nothing comes twice, nothing is left out and the one before can commit nothing more:

1. *Within a layout*, the opener of a member's producer goes on where its last commit ended, and only the last
   one to open it can commit; what is in a share from one offset to another is always the same. So any number
   of attempts, at once or one after another, of one driver or of several, write a share once. This is the
   argument for one producer (`transaction`).
2. *After (3)*, no executor of an earlier lease commits. Let F be the fencing of a member in (3), and S that
   by the executor in (a). If S came before F, it is fenced. If S came after F, it came after (2), too, and so
   did (b), which reads the head up to its end: it finds another lease and stops.
3. *So a new layout begins from rest*: by 2, the offsets that were read in (3) do not move any more, and all
   are the same; what is before that offset is committed, for every key, before anything after it is sent.
   Were they not the same, the old layout stays in force until they are.
4. *A crash between any two steps* leaves the head as it was, or as it was with another lease, or with the new
   layout at the offset where the old one had come to rest. Each is a state from which `taking` begins.

A late S of an earlier lease fences an executor of the new one, once; that one opens its producer again.
In mode at-least-once nothing is fenced; what each offset says is written is true all the same, so nothing
is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from tailrace.errors import Kind, TailraceError


@dataclass(frozen=True, slots=True)
class Head:
    """The task's own offset; see above.

    :param producers: how many members write from `log_offset` on; 0: the task's own producer does.
    """

    log_id: str
    log_offset: int
    producers: int = 0
    layout: str = ""
    lease: str = ""

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Head:
        """Return what an offset says.

        :raises TailraceError: `OFFSETS_UNREADABLE` if it is no head.
        """
        texts = [value.get(name, "") for name in ("log_id", "layout", "lease")]
        numbers = [value.get("log_offset"), value.get("producers", 0)]
        if not all(isinstance(text, str) for text in texts) or not all(
            isinstance(number, int) and number >= 0 for number in numbers
        ):
            raise _unreadable("the task's offset is none of a log")
        (log_id, layout, lease), (log_offset, producers) = texts, numbers
        return cls(log_id, log_offset, producers, layout, lease)

    def as_offset(self) -> dict[str, Any]:
        """Return it as it is written."""
        found: dict[str, Any] = {"log_id": self.log_id, "log_offset": self.log_offset}
        if self.producers:
            found |= {"producers": self.producers, "layout": self.layout}
        if self.lease:
            found |= {"lease": self.lease}
        return found

    def member_offset(self, log_offset: int) -> dict[str, Any]:
        """Return the offset of a member that has come so far, as it is written."""
        return {"log_id": self.log_id, "log_offset": log_offset, "layout": self.layout}

    def reached(self, member_offset: Mapping[str, Any] | None) -> int:
        """Return how far the member is whose newest offset this is.

        :raises TailraceError: `OFFSETS_UNREADABLE`.
        """
        if member_offset is None or member_offset.get("layout") != self.layout:
            return self.log_offset
        found = member_offset.get("log_offset")
        if not isinstance(found, int):
            raise _unreadable("a producer's offset is none of a log")
        return max(found, self.log_offset)


@dataclass(frozen=True, slots=True)
class OpenOwn:
    """Open the task's own producer; the result is the head, or None."""


@dataclass(frozen=True, slots=True)
class WriteHead:
    """Write the head with the own producer."""

    head: Head


@dataclass(frozen=True, slots=True)
class Fence:
    """Fence the owner of a member's producer: it commits nothing more, and what it had begun has ended."""

    number: int


@dataclass(frozen=True, slots=True)
class ReadMembers:
    """Read how far so many members are; the result is the offset of each, or None."""

    producers: int


@dataclass(frozen=True, slots=True)
class ReadHead:
    """Read the head up to the end; the result is the head, or None."""


@dataclass(frozen=True, slots=True)
class OpenMember:
    """Open a member's producer; the result is the member's offset, or None."""

    number: int


@dataclass(frozen=True, slots=True)
class WriteShare:
    """Send the share's records of `[start, end)`, and the offset `end`, as one."""

    number: int
    start: int
    end: int


TakingStep: TypeAlias = OpenOwn | WriteHead | Fence | ReadMembers
SharingStep: TypeAlias = ReadHead | OpenMember | WriteShare


@dataclass(frozen=True, slots=True)
class AssignmentState:
    """How far a task is: its head, and each of its members (or itself). None: there is no head yet."""

    head: Head | None = None
    reached: tuple[int, ...] = ()

    @property
    def position(self) -> int | None:
        """Everything before it is written; None: nothing was ever."""
        return min(self.reached, default=None)

    @property
    def reach(self) -> int | None:
        """Nothing from here on is written."""
        return max(self.reached, default=None)

    @property
    def is_even(self) -> bool:
        """Whether all members are equally far."""
        return self.position == self.reach

    def has(self, producers: int) -> bool:
        """Return whether so many members write now."""
        return self.head is not None and self.head.producers == producers

    def written_to(self, end: int) -> AssignmentState:
        """Return it after every member has written what it lacked before `end`."""
        return replace(self, reached=tuple(max(reached, end) for reached in self.reached))


def taking(
    producers: int, fresh: Callable[[], str], *, fenced: bool = False
) -> Generator[TakingStep, Any, AssignmentState]:
    """Take the task from its present producer, and share it out among `producers` if it may be now.

    While the members of another layout are not equally far, that one stays in force: it must be written
    on until they are, and the task be taken again.

    :param producers: 0: the task's own alone.
    :param fresh: gives a text that was never given before.
    :param fenced: whether opening a producer fences the one before. Else the own producer has no lease: an
        engine without transactions that comes late must not write an old head.
    """
    head: Head | None = yield OpenOwn()
    if head is None:
        return AssignmentState()
    if head.producers or fenced:
        head = replace(head, lease=fresh())
        yield WriteHead(head)
    standing = AssignmentState(head, (head.log_offset,))
    if head.producers:
        for number in range(head.producers):
            yield Fence(number)
        offsets = yield ReadMembers(head.producers)
        standing = AssignmentState(head, tuple(map(head.reached, offsets)))
    if standing.has(producers) or not standing.is_even:
        return standing
    return (yield from beginning(head.log_id, standing.reached[0], producers, fresh, fenced=fenced))


def beginning(
    log_id: str, start: int, producers: int, fresh: Callable[[], str], *, fenced: bool = False
) -> Generator[TakingStep, Any, AssignmentState]:
    """Begin a layout at `start`: nothing from there on is written, and nobody else writes."""
    head = Head(log_id, start, lease=fresh() if producers or fenced else "")
    if producers:
        head = replace(head, producers=producers, layout=fresh())
    yield WriteHead(head)
    return AssignmentState(head, (start,) * max(1, producers))


def sharing(sent_with: Head, number: int, end: int) -> Generator[SharingStep, Any, int | None]:
    """Write what the member `number` lacks of its share before `end`; return how far the member is.

    None: the task was taken by another; nothing was written.

    :param sent_with: the head that the driver had written.
    """
    # Before anything is disturbed; what counts is the second look.
    if not _is_same((yield ReadHead()), sent_with):
        return None
    member_offset = yield OpenMember(number)
    if not _is_same((yield ReadHead()), sent_with):
        return None
    start = sent_with.reached(member_offset)
    if start >= end:
        return start
    yield WriteShare(number, start, end)
    return end


def _is_same(found: Head | None, sent_with: Head) -> bool:
    return found is not None and found.lease == sent_with.lease


def _unreadable(found: str) -> TailraceError:
    return TailraceError(
        Kind.OFFSETS_UNREADABLE,
        f"read offsets: {found}",
        "another program writes to the topic: give offsets_topic a name of its own",
    )
