"""Numbers changes within their transaction and table: `data_collection_order` of Debezium's events.

Changes are numbered before records are transformed, as in Debezium, so that predicates and filters do not
affect the numbers.
"""

from __future__ import annotations

import numpy as np

from tailrace.decode.changes import TableChanges
from tailrace.model import Op
from tailrace.protocol.frames import Numbers


def order_in_table(commit_lsn: Numbers, xid: Numbers) -> Numbers:
    """Return the numbers of a table's changes, which start from 1 in each transaction."""
    count = len(xid)
    if count == 0:
        return np.empty(0, np.int64)
    begins = np.ones(count, np.bool_)
    begins[1:] = (commit_lsn[1:] != commit_lsn[:-1]) | (xid[1:] != xid[:-1])
    first = np.maximum.accumulate(np.where(begins, np.arange(count), 0))
    return np.arange(count, dtype=np.int64) - first + 1


class TableOrders:
    """Numbers changes part by part, in the order of the log; a transaction may span several parts."""

    def __init__(self) -> None:
        # By table: commit LSN, transaction number (xid) and order number of its last change.
        self._last: dict[str, tuple[int, int, int]] = {}

    def of(self, changes: TableChanges) -> Numbers | None:
        """Return the changes' numbers; None for rows of a snapshot, which are in no transaction."""
        if not changes.count or changes.op[0] == ord(Op.READ):
            return None
        commit_lsn, xid = changes.commit_lsn, changes.xid
        found = order_in_table(commit_lsn, xid)
        table = changes.relation.qualified_name if changes.relation else ""
        *before, count = self._last.get(table, (-1, -1, 0))
        if before == [commit_lsn[0], xid[0]]:
            found[(commit_lsn == commit_lsn[0]) & (xid == xid[0])] += count
        self._last[table] = int(commit_lsn[-1]), int(xid[-1]), int(found[-1])
        return found
