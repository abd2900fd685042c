"""Each transaction of the source in one of Kafka's (`transaction_boundary: transaction`).

To read, decode and convert a transaction costs much the same whether it has ten rows or ten thousand. So a
part of the log is converted as one, and its records are then sent and committed transaction by transaction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import structlog

from tailrace.changelog.reader import LogReader
from tailrace.errors import TailraceError
from tailrace.kafka.producer.writer import Writer
from tailrace.protocol.frames import Numbers
from tailrace.ranges import plan
from tailrace.ranges.changes import DECODED_BYTES_MAX
from tailrace.ranges.plan import InputSplit
from tailrace.records.events import CONVERTED_BYTES, bytes_of
from tailrace.sinks.kafka.outgoing import Outgoing
from tailrace.sinks.kafka.records import Records, Sent

log = structlog.get_logger(__name__)

#: Bytes of the log that are converted first, before it is known how much becomes of them.
_FIRST_BYTES = 64 << 10
#: The next part has at most so many times the bytes of the one before: records differ.
_GROWTH = 8


class TransactionWriter:
    """Sends ranges of a log, one commit for each transaction of the source that has records."""

    def __init__(self, task: str, records: Records) -> None:
        self._task = task
        self._records = records
        self._bytes = _FIRST_BYTES

    def write(
        self,
        writer: Writer,
        reader: LogReader,
        start: int,
        end: int,
        sent: Sent,
        commit: Callable[[int], None],
    ) -> None:
        """Send the changes of `[start, end)`, both boundaries of the log.

        :param sent: what is committed is added to it.
        :param commit: called with a boundary of the log when all before it was sent, at last with `end`.
        :raises TailraceError: as `Records.send`; what lies before the transaction that met it is committed.
        """
        at = committed = start
        while at < end:
            # As many rows as bytes at most: that is no bound.
            upto = reader.boundary_within(at, self._bytes, self._bytes, end)
            ends = reader.boundaries(at, upto)
            part = Sent()
            found = self._converted(reader, at, upto, part) if len(ends) > 1 else None
            if found is None:
                upto = int(ends[0])
                part = self._records.send(writer, reader, self._splits(reader, at, upto), at, upto)
                commit(upto)
                committed = upto
                self._bytes = min(self._bytes * _GROWTH, DECODED_BYTES_MAX)
            else:
                self._records.beat(writer)
                committed = max(committed, _send(writer, found, ends, commit))
                made = sum(bytes_of(each.events) for each in found)
                fitting = CONVERTED_BYTES * (upto - at) // max(1, made)
                self._bytes = min(max(1, fitting), self._bytes * _GROWTH, DECODED_BYTES_MAX)
            sent.add(part)
            at = upto
        if committed < end:
            commit(end)

    def _splits(self, reader: LogReader, start: int, end: int) -> list[InputSplit]:
        return plan.input_splits(self._task, reader.blocks(start, end), start, end)

    def _converted(self, reader: LogReader, start: int, end: int, sent: Sent) -> list[Outgoing] | None:
        """Return what several transactions become; None: they are to be taken one by one."""
        splits = self._splits(reader, start, end)
        if self._records.has_beside(splits):
            self._bytes = 1
            return None
        try:
            return list(self._records.outgoing(reader, splits, start, end, sent))
        except TailraceError as error:
            # One by one, what lies before the one that met it is written.
            log.debug("transactions are converted one by one", why=str(error.kind))
            self._bytes = 1
            return None


def _send(writer: Writer, found: list[Outgoing], ends: Numbers, commit: Callable[[int], None]) -> int:
    """Send each transaction's records and commit; return the last boundary that was committed, or 0.

    :param ends: boundaries where transactions end.
    """
    parts: defaultdict[int, list[tuple[Outgoing, int, int]]] = defaultdict(list)
    for outgoing in found:
        upto = np.searchsorted(outgoing.log_offset, ends)
        first = np.concatenate([[0], upto[:-1]])
        for number in np.flatnonzero(first < upto).tolist():
            parts[number].append((outgoing, int(first[number]), int(upto[number])))
    committed = 0
    for number in sorted(parts):
        for outgoing, first_at, last_at in parts[number]:
            outgoing.part(first_at, last_at).send(writer)
        committed = int(ends[number])
        commit(committed)
    return committed
