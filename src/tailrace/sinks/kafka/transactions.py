"""Writes each source transaction in a Kafka transaction of its own (`transaction_boundary: transaction`).

Reading, decoding and converting ten rows costs much the same as ten thousand. So several transactions are
converted together, and their records are then sent and committed transaction by transaction.
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

#: Bytes of the log that are converted first, while the size of their records is unknown.
_FIRST_BYTES = 64 << 10
#: Largest factor by which a part's bytes exceed those of the part before: records differ in size.
_GROWTH = 8


class TransactionWriter:
    """A writer of ranges of a log, with one commit for each transaction of the source that has records."""

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

        :param sent: the counts are added to it.
        :param commit: called with a boundary of the log when all before it was sent, finally with `end`.
        :raises TailraceError: as `Records.send`; everything before the transaction that failed is committed.
        """
        at = committed = start
        while at < end:
            # The limits of bytes and rows are the same number: rows are not limited in effect.
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
        """Return the records of several transactions; None: these must be written one by one."""
        splits = self._splits(reader, start, end)
        if self._records.has_beside(splits):
            self._bytes = 1
            return None
        try:
            return list(self._records.outgoing(reader, splits, start, end, sent))
        except TailraceError as error:
            # One by one, all transactions before the one that fails are written.
            log.debug("transactions are converted one by one", why=str(error.kind))
            self._bytes = 1
            return None


def _send(writer: Writer, found: list[Outgoing], ends: Numbers, commit: Callable[[int], None]) -> int:
    """Send and commit each transaction's records; return the last boundary that was committed, or 0.

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
