"""A model of a broker and a source, for the state machine of the transaction.

The broker keeps, for one transactional id, an epoch, the pending and the committed changes. Source
changes are numbered from 1. A producer may crash between any two of its commands, and another one may
start at any moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tailrace.kafka.producer.transaction import Command, ProducerEvent, ProducerState, Transaction


@dataclass(frozen=True)
class Broker:
    """The durable state: changes and the offset that came with them."""

    epoch: int = 0
    pending: tuple[int, ...] = ()
    pending_offset: int | None = None
    log: tuple[int, ...] = ()
    offset: int = 0

    def initialised(self) -> Broker:
        return replace(self, epoch=self.epoch + 1, pending=(), pending_offset=None)

    def committed(self) -> Broker:
        offset = self.offset if self.pending_offset is None else self.pending_offset
        return replace(self, log=self.log + self.pending, offset=offset, pending=(), pending_offset=None)


@dataclass(frozen=True)
class Producer:
    """One run of a producer: what it knows, and the commands that it has still to carry out."""

    life: Transaction = field(default_factory=Transaction)
    epoch: int = -1
    read: int = 0  # as far as it knows, the source's changes up to here are written
    sent: int = 0
    todo: tuple[Command, ...] = ()
    told: int = 0

    def after(self, event: ProducerEvent) -> Producer:
        life, commands = self.life.step(event)
        # The history is no part of the state: it does not matter for what happens next.
        return replace(self, life=replace(life, steps=()), todo=commands)


def moves(broker: Broker, producer: Producer, changes: int) -> Iterator[tuple[Broker, Producer]]:
    """Yield what may happen next: every answer to the next command, or every event of the driver."""
    if producer.todo:
        yield from _carried_out(broker, replace(producer, todo=producer.todo[1:]), producer.todo[0])
        return
    state = producer.life.state
    if state is ProducerState.NEW:
        yield broker, producer.after(ProducerEvent.START)
    if state in (ProducerState.READY, ProducerState.OPEN) and producer.sent < changes:
        yield broker, producer.after(ProducerEvent.RECORDS)
    if state is ProducerState.OPEN:
        yield broker, producer.after(ProducerEvent.DUE)
        yield broker, producer.after(ProducerEvent.STOP)


def _carried_out(broker: Broker, producer: Producer, command: Command) -> Iterator[tuple[Broker, Producer]]:
    if command is Command.INITIALISE:
        fresh = broker.initialised()
        yield fresh, replace(producer, epoch=fresh.epoch).after(ProducerEvent.INITIALISED)
        yield fresh, producer.after(ProducerEvent.BROKEN)
        return
    if command is Command.READ_OFFSETS:
        yield (
            broker,
            replace(producer, read=broker.offset, sent=broker.offset).after(ProducerEvent.OFFSETS_READ),
        )
        return
    if command in (Command.FAIL, Command.CLOSE):
        yield broker, producer
        return
    if command is Command.TELL_SOURCE:
        yield broker, replace(producer, told=producer.sent)
        return
    if producer.epoch != broker.epoch:
        if command is Command.BEGIN:  # in the client alone
            yield broker, producer
        else:
            yield broker, producer.after(ProducerEvent.FENCED)
        return
    yield from _obeyed(broker, producer, command)


def _obeyed(broker: Broker, producer: Producer, command: Command) -> Iterator[tuple[Broker, Producer]]:
    if command is Command.BEGIN:
        yield broker, producer
    elif command is Command.SEND:
        sent = producer.sent + 1
        yield replace(broker, pending=(*broker.pending, sent)), replace(producer, sent=sent)
        yield broker, producer.after(ProducerEvent.REFUSED)
    elif command is Command.SEND_OFFSET:
        yield replace(broker, pending_offset=producer.sent), producer
        yield broker, producer.after(ProducerEvent.REFUSED)
    elif command is Command.COMMIT:
        yield broker.committed(), producer.after(ProducerEvent.COMMITTED)
        yield broker.committed(), producer.after(ProducerEvent.UNKNOWN)  # the answer was lost
        yield broker, producer.after(ProducerEvent.UNKNOWN)  # the request was lost
        yield broker, producer.after(ProducerEvent.REFUSED)
        yield broker, producer.after(ProducerEvent.BROKEN)
    elif command is Command.ABORT:
        yield replace(broker, pending=(), pending_offset=None), producer.after(ProducerEvent.ABORTED)
        yield broker, producer.after(ProducerEvent.UNKNOWN)
