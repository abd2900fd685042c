"""The states of a transactional producer as a table: event in, next state and commands out.

    NEW ─▶ FENCING ─▶ READING ─▶ READY ⇄ OPEN ─▶ COMMITTING ─▶ READY …
                                   │       │          │
                                   ▼       ╰─ABORTING─┤
                                CLOSED                ▼
                                         FAILED · IN_DOUBT · PREEMPTED

One object is one producer's run. A new producer begins by fencing the one before it
(`INITIALISE`), which ends whatever that had begun; only then are the committed offsets read, so that
what it committed last, even where it never heard of that itself, is seen before anything is sent.
So an unknown outcome needs no case: it ends this producer, and the next one looks first.

A failed commit is never logged and passed over: the transaction is aborted and the producer ends
(KIP-618 and its forerunner, "Source task lifetime"). Pure: no clock, thread or client.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tailrace.state_machine import StateMachine


class ProducerState(enum.StrEnum):
    """What a producer is doing, or how it ended."""

    NEW = "new"
    FENCING = "fencing"
    READING = "reading offsets"
    READY = "ready"
    OPEN = "transaction open"
    COMMITTING = "committing"
    ABORTING = "aborting"
    CLOSED = "closed"
    FAILED = "failed"  # nothing of the open transaction will be seen
    IN_DOUBT = "in doubt"  # whether the last transaction was committed, the next producer finds out
    PREEMPTED = "pre-empted"  # by a later producer; or what was open for too long was ended


class ProducerEvent(enum.StrEnum):
    """What happens to a producer."""

    START = "start"
    INITIALISED = "initialised"
    OFFSETS_READ = "offsets read"
    RECORDS = "records"  # or progress of the source without any
    DUE = "commit due"
    COMMITTED = "committed"
    ABORTED = "aborted"
    REFUSED = "refused"  # an error after which the transaction can only be aborted
    BROKEN = "broken"  # an error after which this producer can do nothing more
    UNKNOWN = "outcome unknown"  # a commit was asked for, and no answer came in time
    FENCED = "fenced"
    STOP = "stop"


class Command(enum.StrEnum):
    """What the driver is to do, in the order given; each answer is an event."""

    INITIALISE = "initialise"
    READ_OFFSETS = "read offsets"
    BEGIN = "begin"
    SEND = "send"
    SEND_OFFSET = "send offset"
    COMMIT = "commit"
    ABORT = "abort"
    TELL_SOURCE = "tell source"
    FAIL = "fail"
    CLOSE = "close"


_S, _E, _C = ProducerState, ProducerEvent, Command

#: A move that is not here is not allowed.
TRANSITIONS: dict[tuple[ProducerState, ProducerEvent], tuple[ProducerState, tuple[Command, ...]]] = {
    (_S.NEW, _E.START): (_S.FENCING, (_C.INITIALISE,)),
    (_S.NEW, _E.STOP): (_S.CLOSED, (_C.CLOSE,)),
    (_S.FENCING, _E.INITIALISED): (_S.READING, (_C.READ_OFFSETS,)),
    (_S.READING, _E.OFFSETS_READ): (_S.READY, ()),
    (_S.READY, _E.RECORDS): (_S.OPEN, (_C.BEGIN, _C.SEND)),
    # No offsets to write: nothing was begun, and nothing is.
    (_S.READY, _E.DUE): (_S.READY, ()),
    (_S.READY, _E.STOP): (_S.CLOSED, (_C.CLOSE,)),
    (_S.OPEN, _E.RECORDS): (_S.OPEN, (_C.SEND,)),
    (_S.OPEN, _E.DUE): (_S.COMMITTING, (_C.SEND_OFFSET, _C.COMMIT)),
    (_S.OPEN, _E.REFUSED): (_S.ABORTING, (_C.ABORT,)),
    # What was not committed is sent again by the next producer.
    (_S.OPEN, _E.STOP): (_S.ABORTING, (_C.ABORT,)),
    (_S.COMMITTING, _E.COMMITTED): (_S.READY, (_C.TELL_SOURCE,)),
    (_S.COMMITTING, _E.REFUSED): (_S.ABORTING, (_C.ABORT,)),
    (_S.COMMITTING, _E.UNKNOWN): (_S.IN_DOUBT, (_C.FAIL,)),
    (_S.COMMITTING, _E.BROKEN): (_S.IN_DOUBT, (_C.FAIL,)),
    (_S.ABORTING, _E.ABORTED): (_S.FAILED, (_C.FAIL,)),
    # The next producer's fencing aborts what could not be aborted here.
    (_S.ABORTING, _E.REFUSED): (_S.FAILED, (_C.FAIL,)),
    (_S.ABORTING, _E.UNKNOWN): (_S.FAILED, (_C.FAIL,)),
    **{
        (state, _E.BROKEN): (_S.FAILED, (_C.FAIL,))
        for state in (_S.FENCING, _S.READING, _S.READY, _S.OPEN, _S.ABORTING)
    },
    **{
        (state, _E.FENCED): (_S.PREEMPTED, (_C.FAIL,))
        for state in (_S.FENCING, _S.READY, _S.OPEN, _S.COMMITTING, _S.ABORTING)
    },
}


@dataclass(frozen=True, slots=True)
class Transaction(StateMachine[ProducerState, ProducerEvent]):
    """A producer's state and the newest steps that led to it."""

    state: ProducerState = ProducerState.NEW

    def step(self, event: ProducerEvent) -> tuple[Transaction, tuple[Command, ...]]:
        """Return the transaction after `event`, and what is to be done.

        :raises IllegalTransition: for a move that the table does not have; always a bug.
        """
        state, commands = self.found(TRANSITIONS, event)
        return self.moved(event, state), commands
