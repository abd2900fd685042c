"""The scan: its results for good frames, and that no frames make it do more than refuse them."""

from __future__ import annotations

import contextlib
import itertools
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import Kind, TailraceError
from tailrace.protocol import frames, metadata_frames


def array(data: bytes) -> frames.Bytes:
    return np.frombuffer(data, np.uint8)


def xlog(payload: bytes) -> bytes:
    return frames.xlog_frame(0, 0, 0, payload)


def begin(commit_lsn: int, xid: int = 7) -> bytes:
    return xlog(b"B" + struct.pack("!QqI", commit_lsn, 1_000_000, xid))


def commit(commit_lsn: int, end_lsn: int) -> bytes:
    return xlog(b"C" + struct.pack("!bQQq", 0, commit_lsn, end_lsn, 1_000_000))


def insert(relation: int) -> bytes:
    return xlog(
        b"I" + struct.pack("!I", relation) + b"N" + struct.pack("!h", 1) + b"t" + struct.pack("!i", 1) + b"x"
    )


def truncate(*relations: int) -> bytes:
    return xlog(b"T" + struct.pack(f"!Ib{len(relations)}I", len(relations), 0, *relations))


def message(lsn: int, *, transactional: bool) -> bytes:
    return xlog(
        b"M" + struct.pack("!bQ", int(transactional), lsn) + b"prefix\0" + struct.pack("!i", 2) + b"hi"
    )


def transaction(commit_lsn: int, *changes: bytes) -> bytes:
    return begin(commit_lsn) + b"".join(changes) + commit(commit_lsn, commit_lsn + 48)


def test_a_transaction_moves_the_position_to_its_commit_end_lsn() -> None:
    data = transaction(1000, insert(5), insert(6))
    summary = frames.summarise(array(data), frames.new_state())
    assert summary.rows == 2
    assert summary.units == 1
    assert summary.boundary == summary.size == len(data)
    assert summary.position == 1048
    assert summary.tables == (5, 6)
    assert summary.open_at_end is None


def test_an_open_transaction_is_carried_to_the_next_chunk_with_its_ordinal() -> None:
    state = frames.new_state()
    first = frames.summarise(array(begin(1000, xid=9) + insert(5)), state)
    assert first.boundary is None
    assert first.open_at_end is not None
    assert (first.open_at_end.xid, first.open_at_end.commit_lsn, first.open_at_end.ordinal) == (9, 1000, 1)
    second = frames.summarise(array(insert(5) + commit(1000, 1048)), state)
    assert second.open_at_start == first.open_at_end
    assert second.boundary == second.size


def test_a_truncate_counts_as_one_change_for_each_of_its_tables() -> None:
    state = frames.new_state()
    summary = frames.summarise(array(begin(1000) + truncate(5, 6, 7) + insert(5)), state)
    assert summary.rows == 4
    assert sorted(summary.tables or ()) == [5, 6, 7]
    assert summary.open_at_end is not None
    assert summary.open_at_end.ordinal == 4


def test_a_message_outside_a_transaction_is_a_separate_unit() -> None:
    summary = frames.summarise(array(message(900, transactional=False)), frames.new_state())
    assert (summary.units, summary.rows, summary.position) == (1, 1, 900)


def test_a_commit_record_may_start_where_a_message_ended() -> None:
    # A message's LSN is the end of its record: the next commit record may start right there.
    state = frames.new_state()
    frames.summarise(array(message(900, transactional=False)), state)
    assert frames.summarise(array(transaction(900, insert(5))), state).units == 1


def test_a_snapshot_is_one_unit_and_its_rows_are_numbered() -> None:
    data = (
        frames.control_frame(frames.SNAPSHOT_BEGIN, 500, 3, {})
        + frames.snapshot_frame(5, 0, 2, b"1\n2\n")
        + frames.snapshot_frame(5, 2, 1, b"3\n")
    )
    state = frames.new_state()
    summary = frames.summarise(array(data), state)
    assert summary.rows == 3
    assert summary.boundary is None
    end = frames.summarise(array(frames.control_frame(frames.SNAPSHOT_END, 500, 3, {})), state)
    assert end.position == 500
    assert end.boundary == end.size


def test_units_of_one_snapshot_share_one_numbering_before_the_next_transaction() -> None:
    state = frames.new_state()
    for first in (0, 3):
        rows = frames.control_frame(frames.SNAPSHOT_BEGIN, 500, 3, {})
        opened = frames.summarise(array(rows + frames.snapshot_frame(5, first, 3, b"1\n2\n3\n")), state)
        assert opened.open_at_end is not None
        assert (opened.open_at_end.commit_lsn, opened.open_at_end.ordinal) == (499, first + 3)
        frames.summarise(array(frames.control_frame(frames.SNAPSHOT_END, 500, 3, {})), state)
    assert frames.summarise(array(transaction(500, insert(5))), state).units == 1


def test_units_are_listed_with_offset_rows_and_position() -> None:
    one, two = transaction(1000, insert(5)), transaction(2000, insert(5), insert(5))
    units = frames.units_of(array(one + two + begin(3000)), frames.new_state())
    assert units[:, :3].tolist() == [[len(one), 1, 1048], [len(one) + len(two), 3, 2048]]


def test_more_tables_than_the_limit_are_not_listed() -> None:
    limit = frames.TABLES_LISTED_MAX
    listed = frames.summarise(array(begin(1) + b"".join(insert(n) for n in range(limit))), frames.new_state())
    unlisted = frames.summarise(
        array(begin(1) + b"".join(insert(n) for n in range(limit + 1))), frames.new_state()
    )
    assert listed.tables is not None
    assert len(listed.tables) == limit
    assert unlisted.tables is None


def test_schema_frames_come_with_a_key_by_which_later_ones_replace_them() -> None:
    relation = xlog(b"R" + struct.pack("!I", 77) + b"public\0t\0d" + struct.pack("!h", 0))
    kind = xlog(b"Y" + struct.pack("!I", 78) + b"public\0mood\0")
    facts = frames.control_frame(frames.FACTS, 0, 0, {"relation": 77})
    data = relation + kind + facts + transaction(9, insert(77))
    assert metadata_frames.schema_frames(array(data)) == [("R77", relation), ("Y78", kind), ("F77", facts)]
    assert frames.summarise(array(data), frames.new_state()).has_schema
    whole = 0
    for end in range(1, len(relation + kind + facts)):
        if end in (len(relation), len(relation + kind)):
            whole += 1
            assert len(metadata_frames.schema_frames(array(data[:end]))) == whole
            continue
        with pytest.raises(TailraceError, match="cut short"):
            metadata_frames.schema_frames(array(data[:end]))
    assert metadata_frames.schema_frames(array(b"d\0\0\0\5x")) == []


def test_schema_frames_may_be_many() -> None:
    every = [xlog(b"R" + struct.pack("!I", oid) + b"public\0t\0d\0\0") for oid in range(1000)]
    assert metadata_frames.schema_frames(array(b"".join(every))) == [
        (f"R{oid}", each) for oid, each in enumerate(every)
    ]


@pytest.mark.parametrize(
    ("data", "position"),
    [
        (insert(5), 0),
        (begin(1000) + begin(2000), 0),
        (begin(999), 1000),
        (begin(1000) + commit(1001, 1048), 0),
        (commit(1000, 1048), 0),
        (xlog(b"Z"), 0),
        (xlog(b"I\0"), 0),
        (b"d" + struct.pack("!i", 6) + b"q?", 0),
        (b"k" + struct.pack("!i", 6) + b"w?", 0),
        (frames.snapshot_frame(5, 0, 1, b"1\n"), 0),
        (
            frames.control_frame(frames.SNAPSHOT_BEGIN, 5, 0, {})
            + frames.snapshot_frame(5, 7, 1, b"1\n")
            + frames.snapshot_frame(5, 9, 1, b"1\n"),
            0,
        ),
        (frames.control_frame(frames.PROGRESS, 5, 0, {}), 6),
        (begin(1000) + xlog(b"T" + struct.pack("!Ib", 2**31, 0)), 0),
    ],
)
def test_invalid_frames_are_refused_with_an_error(data: bytes, position: int) -> None:
    with pytest.raises(TailraceError) as caught:
        frames.summarise(array(data), frames.new_state(position))
    assert caught.value.kind is Kind.PROTOCOL_VIOLATION


@pytest.mark.parametrize("letter", list("SEcAbPKrp"))
@pytest.mark.parametrize("before", [b"", begin(1000)], ids=["outside of a transaction", "in one"])
def test_messages_of_transactions_that_are_streamed_or_prepared_are_refused(
    letter: str, before: bytes
) -> None:
    # We never request them: STREAM START, STOP, COMMIT and ABORT, and those of two-phase commits.
    with pytest.raises(TailraceError, match="a type that protocol 1 does not have") as caught:
        frames.summarise(array(before + xlog(letter.encode() + bytes(40))), frames.new_state())
    assert caught.value.kind is Kind.PROTOCOL_VIOLATION


def test_a_commit_record_may_start_where_the_one_before_ended() -> None:
    data = transaction(1000, insert(5)) + transaction(1048, insert(5))
    assert frames.summarise(array(data), frames.new_state()).units == 2


STREAM = (
    transaction(1000, insert(5), truncate(5, 6))
    + message(1100, transactional=False)
    + frames.control_frame(frames.PROGRESS, 1200, 0, {})
    + frames.control_frame(frames.SNAPSHOT_BEGIN, 1300, 0, {})
    + frames.snapshot_frame(5, 0, 1, b"1\n")
    + frames.control_frame(frames.SNAPSHOT_END, 1300, 0, {})
    + transaction(1400, insert(6))
)


def test_every_cut_inside_a_frame_is_refused_and_between_frames_is_not() -> None:
    ends = {at for at, _ in frames.each_frame(array(STREAM))} | {len(STREAM)}
    for cut in range(len(STREAM) + 1):
        if cut in ends:
            frames.summarise(array(STREAM[:cut]), frames.new_state())
        else:
            with pytest.raises(TailraceError):
                frames.summarise(array(STREAM[:cut]), frames.new_state())


@given(st.integers(0, len(STREAM) - 1), st.binary(min_size=1, max_size=12))
def test_no_garbled_frame_does_more_than_be_refused(at: int, garbage: bytes) -> None:
    data = bytearray(STREAM)
    data[at : at + len(garbage)] = garbage
    with contextlib.suppress(TailraceError):
        assert frames.summarise(array(bytes(data)), frames.new_state()).size == len(data)


@given(st.lists(st.integers(0, len(STREAM)), max_size=5))
def test_the_scan_does_not_depend_on_how_frames_are_divided_into_chunks(cuts: list[int]) -> None:
    ends = sorted({at for at, _ in frames.each_frame(array(STREAM))})
    edges = sorted({0, len(STREAM)} | {max(end for end in ends if end <= cut) for cut in cuts})
    state = frames.new_state()
    parts = [frames.summarise(array(STREAM[a:b]), state) for a, b in itertools.pairwise(edges)]
    whole = frames.summarise(array(STREAM), frames.new_state())
    assert sum(part.rows for part in parts) == whole.rows
    assert sum(part.units for part in parts) == whole.units
    assert parts[-1].position == whole.position


@given(st.integers(0, len(STREAM)))
def test_the_part_before_the_last_boundary_has_the_result_of_a_scan_of_it_alone(cut: int) -> None:
    end = max(at for at in [*(at for at, _ in frames.each_frame(array(STREAM))), len(STREAM)] if at <= cut)
    whole = frames.summarise(array(STREAM[:end]), frames.new_state())
    if whole.boundary is None or whole.boundary == whole.size:
        assert whole.to_boundary is None
        return
    head = frames.summarise(array(STREAM[: whole.boundary]), frames.new_state())
    assert whole.to_boundary == head
    units = frames.units_of(array(STREAM[:end]), frames.new_state())
    assert whole.time_max_us == head.time_max_us == max(units[:, 3])
