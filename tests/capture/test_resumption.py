"""After a restart, exactly the transactions that the log has are dropped."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.sources.postgres.streaming.frame_filters import ResumptionFilter
from tests.support.capture.stream_of import begin, insert, logical_message, relation, transaction

POSITION = 1000


def applied(stream: bytes, *, position: int = POSITION) -> bytes:
    return ResumptionFilter(position).apply(np.frombuffer(bytearray(stream), np.uint8)).tobytes()


def test_transactions_before_the_position_are_dropped_completely() -> None:
    new = transaction(1000, 1048, insert(6))
    assert applied(transaction(900, 948, insert(5)) + transaction(950, 1000, insert(5)) + new) == new


def test_a_commit_that_starts_at_the_position_is_new() -> None:
    # With <= for < this transaction would be lost: WAL records are adjacent.
    new = transaction(POSITION, POSITION + 48, insert(5))
    assert applied(new) == new


def test_a_message_that_ends_at_the_position_is_known() -> None:
    later = logical_message(POSITION + 1)
    assert applied(logical_message(POSITION) + later) == later


def test_a_message_inside_a_transaction_is_treated_with_it() -> None:
    known = transaction(900, 948, logical_message(POSITION + 500, transactional=True))
    new = transaction(1000, 1048, logical_message(5, transactional=True), insert(6))
    assert applied(known + new) == new


def test_relation_messages_of_dropped_transactions_are_kept() -> None:
    new = transaction(1000, 1048, insert(5))
    assert applied(begin(900) + relation(5) + insert(5)) == relation(5)
    assert applied(transaction(900, 948, relation(5), insert(5)) + new) == relation(5) + new


def test_the_filter_ends_with_the_first_new_transaction() -> None:
    filter_ = ResumptionFilter(POSITION)
    filter_.apply(np.frombuffer(bytearray(transaction(1000, 1048)), np.uint8))
    assert filter_.done
    strange = np.frombuffer(bytearray(transaction(10, 20)), np.uint8)
    assert filter_.apply(strange) is strange  # the log's scan refuses this


@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12),
    st.integers(0, 12),
    st.data(),
)
def test_any_cut_between_frames_gives_the_same(
    shapes: list[tuple[int, bool]], known: int, data: st.DataObject
) -> None:
    transactions = []
    for k, (count, described) in enumerate(shapes):
        changes = [relation(k)] * described + [insert(k)] * count
        transactions.append(transaction(100 * k, 100 * k + 48, *changes))
    parts = [part for unit in transactions for part in _frames(unit)]
    cut = data.draw(st.integers(0, len(parts)))
    filter_ = ResumptionFilter(100 * known)
    pieces = [b"".join(parts[:cut]), b"".join(parts[cut:])]
    got = b"".join(filter_.apply(np.frombuffer(bytearray(p), np.uint8)).tobytes() for p in pieces if p)
    wanted = b"".join(relation(k) for k, (_, described) in enumerate(shapes[:known]) if described)
    assert got == wanted + b"".join(transactions[known:])
    assert filter_.dropped == min(known, len(shapes))


def _frames(stream: bytes) -> list[bytes]:
    found = []
    while stream:
        size = 1 + int.from_bytes(stream[1:5], "big")
        found.append(stream[:size])
        stream = stream[size:]
    return found


@pytest.mark.parametrize("stream", [b"", b"d", b"d\0\0\0\x04", b"d\xff\xff\xff\xffwB"])
def test_an_invalid_frame_is_left_to_the_scan(stream: bytes) -> None:
    assert applied(stream) == stream
