"""Positions of shards: what the frames say of each transaction, and which rows belong to it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tailrace.decode.shards import ShardPositions, find_shards, joined, rows_of
from tailrace.sources.row_frames import ColumnShape, RowFrames, TableShape

SHAPE = TableShape(1, "shop", "t", (ColumnShape("id", "int8", 1),), ("id",))

_LSNS = st.lists(st.integers(0, 30), unique=True, max_size=12).map(sorted)


def _positions(lsns: list[int]) -> ShardPositions:
    numbers = np.array(lsns, np.int64)
    names, gtids = (pa.array([f"{kind}{lsn}" for lsn in lsns], pa.string()) for kind in ("shop/", "g:"))
    return ShardPositions(numbers, names, gtids, numbers, numbers, numbers)


@given(_LSNS, st.lists(st.integers(0, 30), max_size=20).map(sorted))
def test_a_row_belongs_to_the_transaction_with_its_position(lsns: list[int], rows: list[int]) -> None:
    found = rows_of(_positions(lsns), np.array(rows, np.int64))
    expected = [f"g:{row}" if row in lsns else None for row in rows]
    assert found.of(found.positions.gtid).to_pylist() == expected


@given(_LSNS, _LSNS)
def test_parts_are_joined_in_order_with_each_transaction_once(one: list[int], other: list[int]) -> None:
    found = joined([_positions(one), _positions(other)])
    assert found.commit_lsn.tolist() == sorted({*one, *other})
    assert found.gtid.to_pylist() == [f"g:{lsn}" for lsn in found.commit_lsn]


_GTIDS = st.lists(
    st.lists(
        st.tuples(st.integers(1, 10**9), st.integers(0, 10**9)).map(lambda pair: (pair[0], sum(pair))),
        min_size=1,
        max_size=3,
    ),
    min_size=1,
    max_size=3,
)


@given(st.lists(st.tuples(_GTIDS, st.integers(0, 5), st.integers(0, 10**15)), min_size=1, max_size=200))
def test_the_positions_of_any_number_of_transactions_are_found(
    transactions: list[tuple[list[list[tuple[int, int]]], int, int]],
) -> None:
    written = RowFrames()
    written.describe(SHAPE)
    expected = []
    for number, (sets, epoch, watermark) in enumerate(transactions):
        gtid = "MySQL56/" + ",".join(
            f"{server:08x}-0000-11eb-b894-04ed332e05c2:" + ":".join(f"{first}-{last}" for first, last in each)
            for server, each in enumerate(sets)
        )
        state = {"v": 1, **({"epoch": epoch} if epoch else {}), "watermark": watermark, "gtid": gtid}
        written.begin(10 + number, 0)
        written.shard('shop/ä"80-', state)
        written.commit()
        expected.append((10 + number, gtid, epoch, sum(each[-1][1] for each in sets), watermark))
    # One outside of a transaction belongs to none.
    written.shard("shop/-80", {"v": 1, "gtid": "MySQL56/x:1-9"})
    found = find_shards(written.take(), None)
    columns = found.commit_lsn, found.gtid.to_pylist(), found.epoch, found.rank, found.watermark_us
    assert list(zip(*columns, strict=True)) == expected
    assert set(found.shard.to_pylist()) == {'shop/\\u00e4\\"80-'}


def test_transactions_may_be_as_small_as_possible() -> None:
    written = RowFrames()
    for number in range(300):
        written.begin(10 + number, 0)
        written.shard("a/b", {"gtid": f"x:{number}"})
        written.commit()
    assert find_shards(written.take(), None).gtid.to_pylist() == [f"x:{number}" for number in range(300)]
