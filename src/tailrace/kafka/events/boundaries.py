"""Counts the events of each of the source's transactions, by table, for the records of their boundaries.

A range of the log contains whole transactions, but its changes are sent table by table and part by part.
So events are counted as they are sent, and at the end of the range the counts are merged by transaction.
Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from tailrace.decode.kernel import NONE
from tailrace.decode.shards import RowShards, ShardPositions, joined, rows_of
from tailrace.protocol.frames import Numbers

#: Rows of an array with one column for each transaction and table.
_COMMIT_LSN, _XID, _TIME_US, _FIRST_LSN, _TABLE, _EVENTS = range(6)


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """Transactions in the order of their commits.

    :param first_lsn: of the first change that was sent.
    :param events: number of events sent, without tombstones.
    :param tables: for each transaction a list of structs `data_collection`, `event_count`.
    :param shards: positions of the shards, for sources with shards.
    """

    xid: Numbers
    commit_lsn: Numbers
    time_us: Numbers
    first_lsn: Numbers
    events: Numbers
    tables: pa.ListArray
    shards: RowShards

    def __len__(self) -> int:
        return len(self.xid)


@dataclass(slots=True)
class Boundaries:
    """Event counts of the transactions of one range."""

    _tables: dict[str, int] = field(default_factory=dict)
    _parts: list[Numbers] = field(default_factory=list)
    _shards: list[ShardPositions] = field(default_factory=list)

    def note(
        self, table: str, commit_lsn: Numbers, xid: Numbers, time_us: Numbers, lsn: Numbers, events: Numbers
    ) -> None:
        """Count changes of a table, in log order; `events` is the number of events of each change.

        Changes without a transaction are not counted.
        """
        within = xid != NONE
        if not within.all():
            commit_lsn, xid, time_us, lsn, events = (
                numbers[within] for numbers in (commit_lsn, xid, time_us, lsn, events)
            )
        if not len(xid):
            return
        begins = np.flatnonzero(np.diff(commit_lsn, prepend=commit_lsn[0] - 1))
        number = self._tables.setdefault(table, len(self._tables))
        self._parts.append(
            np.stack(
                [
                    commit_lsn[begins],
                    xid[begins],
                    time_us[begins],
                    np.minimum.reduceat(lsn, begins),
                    np.full(len(begins), number, np.int64),
                    np.add.reduceat(events, begins),
                ]
            )
        )

    def note_shards(self, positions: ShardPositions, commit_lsn: Numbers) -> None:
        """Record the shards' positions at these commits, as far as they are known."""
        places = positions.places(np.unique(commit_lsn))
        self._shards.append(positions.take(places[places >= 0]))

    def ended(self) -> Ended:
        """Return the transactions counted, and reset the counts."""
        names = pa.array(list(self._tables), pa.string())
        parts = np.concatenate([np.empty((6, 0), np.int64), *self._parts], axis=1)
        shards = joined(self._shards) if self._shards else None
        self._parts, self._tables, self._shards = [], {}, []
        parts = _merged(parts[:, np.lexsort((parts[_TABLE], parts[_COMMIT_LSN]))], _COMMIT_LSN, _TABLE)
        whole = _merged(parts, _COMMIT_LSN)
        begins = np.searchsorted(parts[_COMMIT_LSN], whole[_COMMIT_LSN])
        counts = pa.StructArray.from_arrays(
            [names.take(pa.array(parts[_TABLE])), pa.array(parts[_EVENTS])],
            ["data_collection", "event_count"],
        )
        offsets = np.append(begins, parts.shape[1]).astype(np.int32)
        tables = pa.ListArray.from_arrays(pa.array(offsets), counts)
        return Ended(
            whole[_XID],
            whole[_COMMIT_LSN],
            whole[_TIME_US],
            whole[_FIRST_LSN],
            whole[_EVENTS],
            tables,
            rows_of(shards, whole[_COMMIT_LSN]),
        )


def _merged(parts: Numbers, *by: int) -> Numbers:
    # Merges adjacent columns that are equal in the rows `by`: the smallest LSN, the sum of events.
    if not parts.shape[1]:
        return parts
    differs = np.ones(parts.shape[1], np.bool_)
    differs[1:] = (parts[list(by), 1:] != parts[list(by), :-1]).any(axis=0)
    begins = np.flatnonzero(differs)
    found = parts[:, begins].copy()
    found[_FIRST_LSN] = np.minimum.reduceat(parts[_FIRST_LSN], begins)
    found[_EVENTS] = np.add.reduceat(parts[_EVENTS], begins)
    return found
