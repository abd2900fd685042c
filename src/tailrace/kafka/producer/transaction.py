"""The states of a transactional producer as a table: event in, next state and commands out.

    NEW ─▶ FENCING ─▶ READING ─▶ READY ⇄ OPEN ─▶ COMMITTING ─▶ READY …
                                   │       │          │
                                   ▼       ╰─ABORTING─┤
                                CLOSED                ▼
                                         FAILED · IN_DOUBT · PREEMPTED

One object is one producer, from start to end. A new producer first fences the one before it
(`INITIALISE`), which ends that producer's open transaction, and only then reads the committed offsets: it
sees the last commit before it sends anything, even if the producer before got no answer to that commit.
So an unknown outcome needs no special case: it ends this producer, and the next one reads the offsets.

A failed commit is never just logged: the transaction is aborted and the producer ends
(KIP-618 and its predecessor, "Source task lifetime"). Pure: no clock, thread or client.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tailrace.state_machine import StateMachine


class ProducerState(enum.StrEnum):
    """A producer's state."""

    NEW = "new"
    FENCING = "fencing"
    READING = "reading offsets"
    READY = "ready"
    OPEN = "transaction open"
    COMMITTING = "committing"
    ABORTING = "aborting"
    CLOSED = "closed"
    FAILED = "failed"  # the open transaction will never be committed
    IN_DOUBT = "in doubt"  # the next producer finds out whether the last transaction was committed
    PREEMPTED = "pre-empted"  # by a later producer; or the cluster aborted a transaction open for too long


class ProducerEvent(enum.StrEnum):
    """An event of a producer's life: a call, or an answer of the cluster."""

    START = "start"
    INITIALISED = "initialised"
    OFFSETS_READ = "offsets read"
    RECORDS = "records"  # or progress of the source without records
    DUE = "commit due"
    COMMITTED = "committed"
    ABORTED = "aborted"
    REFUSED = "refused"  # an error after which the transaction can only be aborted
    BROKEN = "broken"  # an error after which this producer can do nothing more
    UNKNOWN = "outcome unknown"  # no answer to a commit arrived in time
    FENCED = "fenced"
    STOP = "stop"


class Command(enum.StrEnum):
    """An action for the driver, in the order given; its result is an event."""

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

#: The next state and the commands for each state and event. A transition that is not listed is not allowed.
TRANSITIONS: dict[tuple[ProducerState, ProducerEvent], tuple[ProducerState, tuple[Command, ...]]] = {
    (_S.NEW, _E.START): (_S.FENCING, (_C.INITIALISE,)),
    (_S.NEW, _E.STOP): (_S.CLOSED, (_C.CLOSE,)),
    (_S.FENCING, _E.INITIALISED): (_S.READING, (_C.READ_OFFSETS,)),
    (_S.READING, _E.OFFSETS_READ): (_S.READY, ()),
    (_S.READY, _E.RECORDS): (_S.OPEN, (_C.BEGIN, _C.SEND)),
    # No offsets to write: no transaction is open, and none is begun.
    (_S.READY, _E.DUE): (_S.READY, ()),
    (_S.READY, _E.STOP): (_S.CLOSED, (_C.CLOSE,)),
    (_S.OPEN, _E.RECORDS): (_S.OPEN, (_C.SEND,)),
    (_S.OPEN, _E.DUE): (_S.COMMITTING, (_C.SEND_OFFSET, _C.COMMIT)),
    (_S.OPEN, _E.REFUSED): (_S.ABORTING, (_C.ABORT,)),
    # The next producer sends uncommitted records again.
    (_S.OPEN, _E.STOP): (_S.ABORTING, (_C.ABORT,)),
    (_S.COMMITTING, _E.COMMITTED): (_S.READY, (_C.TELL_SOURCE,)),
    (_S.COMMITTING, _E.REFUSED): (_S.ABORTING, (_C.ABORT,)),
    (_S.COMMITTING, _E.UNKNOWN): (_S.IN_DOUBT, (_C.FAIL,)),
    (_S.COMMITTING, _E.BROKEN): (_S.IN_DOUBT, (_C.FAIL,)),
    (_S.ABORTING, _E.ABORTED): (_S.FAILED, (_C.FAIL,)),
    # If this abort fails, the next producer aborts the transaction by fencing.
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
    """A producer's state and the latest steps that led to it."""

    state: ProducerState = ProducerState.NEW

    def step(self, event: ProducerEvent) -> tuple[Transaction, tuple[Command, ...]]:
        """Return the transaction after `event`, and the commands to carry out.

        :raises IllegalTransition: for a transition that is not in the table; always a bug.
        """
        state, commands = self.found(TRANSITIONS, event)
        return self.moved(event, state), commands
