"""The protocol by which several producers share one task: taking the task over, and changing their number.

Records in the offsets topic say how far the task is written:

- the *head*, the task's own offset: everything before its `log_offset` is written. From there on either the
  task's own producer writes (`producers` 0), or `producers` *members* do, each its share of the records,
  which depends on their keys (`partitioner`). `layout` identifies this division, `lease` the last owner.
- an offset for each member, committed with its records: how far its share is written. It counts only if it
  belongs to the current layout, not to an earlier one with another number of producers.

Only the task's own producer writes the head. A driver that takes over a task with transactions first writes
a head with a new lease, even if there are no members: a producer that is fenced later finds another lease if
another engine has taken the task over, and its own if the cluster aborted a transaction that was open for
too long. The protocol consists of two generators of steps: the caller
carries out each step and sends its result back. Pure: no clock, thread or client.

`taking` is for the driver, at its start: (1) it opens the task's own producer, which fences that of the
driver before; (2) it writes the head with a new lease; (3) it fences each member's producer, and then reads
each member's offset: an offset can't be read while a transaction of another member is open before it. Only
then does it know where to continue; and if all members are at the same offset, it may begin another layout.
`sharing` is for an executor, which writes one share: (a) it opens the member's producer; (b) it reads the
head, and stops unless it has the lease that the driver sent; (c) it writes from the member's offset on.

Why no record is written twice, none is left out, and the former owner can commit nothing more:

1. *Within a layout*, an executor that opens a member's producer continues where its last commit ended, and
   only the last one to open it can commit; the records of a share between two offsets are always the same.
   So any number of attempts, at once or one after another, of one driver or of several, write a share once.
   This is the argument for one producer (`transaction`).
2. *After (3)*, no executor of an earlier lease commits. Let F be the fencing of a member in (3), and S that
   by the executor in (a). If S came before F, it is fenced. If S came after F, it came after (2), too, and so
   did (b), which reads the head up to its end: it finds another lease and stops.
3. *So a new layout begins when nothing is being written*: by 2, the offsets that were read in (3) no longer
   change, and all are equal; for every key, all records before that offset are committed before any record
   after it is sent. While they are not equal, the old layout remains in force.
4. *A crash between any two steps* leaves the head as it was, or with another lease, or with the new layout at
   the offset where all members of the old one ended. `taking` can start from each of these states.

A late S of an earlier lease fences an executor of the new one, once; that executor opens its producer again.
In mode at-least-once nothing is fenced; still, everything before a recorded offset is written, so no record
is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from tailrace.errors import Kind, TailraceError


@dataclass(frozen=True, slots=True)
class Head:
    """The task's own offset; see the module's docstring.

    :param producers: number of members that write from `log_offset` on; 0: the task's own producer writes.
    """

    log_id: str
    log_offset: int
    producers: int = 0
    layout: str = ""
    lease: str = ""

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Head:
        """Return the head that an offset record contains.

        :raises TailraceError: `OFFSETS_UNREADABLE` if it is not a head.
        """
        texts = [value.get(name, "") for name in ("log_id", "layout", "lease")]
        numbers = [value.get("log_offset"), value.get("producers", 0)]
        if not all(isinstance(text, str) for text in texts) or not all(
            isinstance(number, int) and number >= 0 for number in numbers
        ):
            raise _unreadable("the task's offset is not an offset of a log")
        (log_id, layout, lease), (log_offset, producers) = texts, numbers
        return cls(log_id, log_offset, producers, layout, lease)

    def as_offset(self) -> dict[str, Any]:
        """Return the head as it is written to the offsets topic."""
        found: dict[str, Any] = {"log_id": self.log_id, "log_offset": self.log_offset}
        if self.producers:
            found |= {"producers": self.producers, "layout": self.layout}
        if self.lease:
            found |= {"lease": self.lease}
        return found

    def member_offset(self, log_offset: int) -> dict[str, Any]:
        """Return the offset record of a member whose share is written up to `log_offset`."""
        return {"log_id": self.log_id, "log_offset": log_offset, "layout": self.layout}

    def reached(self, member_offset: Mapping[str, Any] | None) -> int:
        """Return the log offset up to which a member has written, given its newest offset record.

        :raises TailraceError: `OFFSETS_UNREADABLE`.
        """
        if member_offset is None or member_offset.get("layout") != self.layout:
            return self.log_offset
        found = member_offset.get("log_offset")
        if not isinstance(found, int):
            raise _unreadable("a producer's offset is not an offset of a log")
        return max(found, self.log_offset)


@dataclass(frozen=True, slots=True)
class OpenOwn:
    """A step: open the task's own producer; the result is the head, or None."""


@dataclass(frozen=True, slots=True)
class WriteHead:
    """A step: write the head with the task's own producer."""

    head: Head


@dataclass(frozen=True, slots=True)
class Fence:
    """A step: fence a member's producer; its open transaction is aborted, and it commits nothing more."""

    number: int


@dataclass(frozen=True, slots=True)
class ReadMembers:
    """A step: read the members' offsets; the result is each one's offset, or None."""

    producers: int


@dataclass(frozen=True, slots=True)
class ReadHead:
    """A step: read the newest head, up to the topic's end; the result is the head, or None."""


@dataclass(frozen=True, slots=True)
class OpenMember:
    """A step: open a member's producer; the result is the member's offset, or None."""

    number: int


@dataclass(frozen=True, slots=True)
class WriteShare:
    """A step: write the share's records of `[start, end)` and the offset `end` in one transaction."""

    number: int
    start: int
    end: int


TakingStep: TypeAlias = OpenOwn | WriteHead | Fence | ReadMembers
SharingStep: TypeAlias = ReadHead | OpenMember | WriteShare


@dataclass(frozen=True, slots=True)
class AssignmentState:
    """A task's head (None: there is none yet), and the log offset that each of its producers has reached."""

    head: Head | None = None
    reached: tuple[int, ...] = ()

    @property
    def position(self) -> int | None:
        """The log offset before which everything is written; None: nothing was ever written."""
        return min(self.reached, default=None)

    @property
    def reach(self) -> int | None:
        """The log offset from which on nothing is written."""
        return max(self.reached, default=None)

    @property
    def is_even(self) -> bool:
        """Whether all members have reached the same offset."""
        return self.position == self.reach

    def has(self, producers: int) -> bool:
        """Return whether the number of members is `producers`."""
        return self.head is not None and self.head.producers == producers

    def written_to(self, end: int) -> AssignmentState:
        """Return the state after every member has written its share up to `end`."""
        return replace(self, reached=tuple(max(reached, end) for reached in self.reached))


def taking(
    producers: int, fresh: Callable[[], str], *, fenced: bool = False
) -> Generator[TakingStep, Any, AssignmentState]:
    """Take the task over from its current producer, and share it among `producers` members if possible.

    While the members of another layout have not reached the same offset, that layout stays in force: its
    members must write until they have, and then the task must be taken over again.

    :param producers: number of members; 0: the task's own producer alone.
    :param fresh: returns a new unique text.
    :param fenced: whether opening a producer fences the one before. If not, the own producer has no lease: a
        late engine without transactions must not write an old head.
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
    """Begin a layout at `start`, from where on nothing is written, while no other producer writes."""
    head = Head(log_id, start, lease=fresh() if producers or fenced else "")
    if producers:
        head = replace(head, producers=producers, layout=fresh())
    yield WriteHead(head)
    return AssignmentState(head, (start,) * max(1, producers))


def sharing(sent_with: Head, number: int, end: int) -> Generator[SharingStep, Any, int | None]:
    """Write the rest of the member's share before `end`; return the log offset that the member has reached.

    None: another driver has taken the task over; nothing was written.

    :param sent_with: the head that the driver wrote.
    """
    # An early check, before another producer is fenced; the second one decides.
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
