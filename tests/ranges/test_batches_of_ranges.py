"""Which records of a log's batches end a transaction if some of its tables are excluded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.changelog.reader import LogReader
from tailrace.protocol.frames import TRANSACTION_OPEN, OpenUnit
from tailrace.ranges.batches import batches_of
from tailrace.ranges.changes import DecodedBatch, decoded_batches
from tailrace.ranges.plan import InputSplit
from tailrace.records.batch import Batch
from tests.support.spark.wire import INT8, HandmadeLog, insert, relation

KEPT = relation(1, "public.kept", {"id": INT8})
LEFT_OUT = relation(2, "public.left_out", {"id": INT8})


def batches(path: Path) -> list[DecodedBatch]:
    with LogReader.open(path, "0") as reader:
        end = reader.end().offset
        return list(decoded_batches(reader, InputSplit("0", 0, 0, end, tuple(reader.blocks(0, end)))))


def batch_of(decoded: DecodedBatch, table: str) -> Batch:
    """Return the batch of one table, as a `python` sink with `tables` delivers it."""
    changes = [c for c in decoded.changes if c.relation and c.relation.table == table]
    (batch,) = batches_of({}, "log", DecodedBatch(changes, decoded.end, decoded.open_at_end), 10, None)
    return batch


def test_the_last_of_a_transactions_records_ends_it(tmp_path: Path) -> None:
    with HandmadeLog(tmp_path / "log") as log:
        log.commit(KEPT, LEFT_OUT, insert(1, "1"), insert(1, "2"), insert(2, "1"))
        log.commit(insert(2, "2"), insert(1, "3"))
        log.commit(insert(2, "3"), insert(1, "4"), insert(2, "4"))
        (decoded,) = batches(log.path)
    batch = batch_of(decoded, "kept")
    ends = batch.transaction_ends
    assert ends is not None
    assert [(record.after["id"], bool(ends[record.place])) for record in batch] == [
        (1, False),
        (2, True),
        (3, True),
        (4, True),
    ]


@pytest.mark.parametrize(("changes", "said"), [(None, None), (0, None), (3, [])])
def test_a_batch_without_records_tells_whether_a_transaction_is_open(
    changes: int | None, said: list[bool] | None
) -> None:
    unit = None if changes is None else OpenUnit(TRANSACTION_OPEN, 7, 1000, 0, changes)
    ends = batch_of(DecodedBatch([], 9, unit), "kept").transaction_ends
    assert (None if ends is None else ends.tolist()) == said
