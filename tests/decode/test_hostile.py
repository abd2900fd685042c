"""For any bytes: a named error or a decode; never a crash, a hang, or memory by a made-up number."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.decode.changes import decode_block
from tailrace.errors import Kind, TailraceError
from tailrace.protocol import frames
from tailrace.protocol.frames import XLOG_PAYLOAD_AT
from tailrace.protocol.pgoutput import parse_relation
from tests.support.decode.hostile import REFUSED, SHAPE, require_named, seed
from tests.support.decode.wire import (
    SOURCE,
    begin,
    block,
    cells,
    commit,
    decode,
    insert,
    relation,
    snapshot,
    transaction,
    truncate,
    vector,
    xlog,
)  # fmt: skip
from tests.support.examples import examples

OPENED = frames.OpenUnit(frames.TRANSACTION_OPEN, 7, 1000, 0, 0)


def survive(data: bytes, schema: Iterable[bytes] = (SHAPE,), opened: frames.OpenUnit | None = None) -> None:
    """Decode in every form; allow only the named errors."""
    try:
        found = decode_block(block(data), 0, opened, schema)
    except TailraceError as error:
        require_named(error)
        return
    for changes in found:
        forms: list[Any] = [lambda c=changes: c.envelope("0"), lambda c=changes: c.json_lines("0", SOURCE)]
        if changes.relation is not None:
            forms += [changes.rows, changes.old_keys]
        for form in forms:
            try:
                made = form()
            except TailraceError as error:
                require_named(error)
            else:
                if made is not None:
                    made.validate(full=True)


def rows_of(data: bytes) -> None:
    for changes in decode(data):
        changes.rows()


def test_the_seed_itself_decodes() -> None:
    assert sum(changes.count for changes in decode(seed())) == 10


def test_every_truncation_is_survived() -> None:
    data = seed()
    for size in range(len(data)):
        survive(data[:size])


@examples(400)
@given(st.data())
def test_mutations_are_survived(data: st.DataObject) -> None:
    mutated = bytearray(seed())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(mutated) - 1))
        match data.draw(st.sampled_from(["set", "cut", "insert", "length"])):
            case "set":
                mutated[at] = data.draw(st.integers(0, 255))
            case "cut":
                del mutated[at : at + data.draw(st.integers(1, 20))]
            case "insert":
                mutated[at:at] = data.draw(st.binary(max_size=20))
            case "length":
                mutated[at : at + 4] = data.draw(
                    st.sampled_from([b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\x80\0\0\0", bytes(4)])
                )
        mutated = mutated or bytearray(b"d")
    survive(bytes(mutated))
    survive(bytes(mutated), opened=OPENED)


@examples(300)
@given(st.lists(st.binary(max_size=60), max_size=6), st.sampled_from(b"IUDTMRYBCO"))
def test_random_messages_in_sound_frames_are_survived(payloads: list[bytes], letter: int) -> None:
    survive(b"".join(xlog(bytes([letter]) + payload) for payload in payloads), opened=OPENED)


@examples(300)
@given(
    st.lists(st.tuples(st.sampled_from(b"IUD"), st.sampled_from(b"NKO"), st.binary(max_size=40)), max_size=6)
)
def test_random_tuples_of_a_known_table_are_survived(changes: list[tuple[int, int, bytes]]) -> None:
    head = struct.pack("!I", 16385)
    sound = (bytes([letter]) + head + bytes([mark]) + b"\0\5" + rest for letter, mark, rest in changes)
    survive(b"".join(map(xlog, sound)), opened=OPENED)


@examples(300)
@given(st.integers(0, 9), st.lists(st.text("\\N\tabtn\n", max_size=30), max_size=5))
def test_random_copy_lines_are_survived(rows: int, lines: list[str]) -> None:
    text = "".join(line + "\n" for line in lines).encode()
    survive(snapshot(frames.snapshot_frame(16385, 0, rows, text)))


@pytest.mark.slow
def test_flips_in_real_streams_are_survived() -> None:
    rng = random.Random(20)
    for name in ("types", "updates", "ddl"):
        data = bytes.fromhex(vector(name)["frames"])
        for _ in range(30):
            mutated = bytearray(data)
            for _ in range(rng.randint(1, 5)):
                mutated[rng.randrange(len(mutated))] = rng.randrange(256)
            survive(bytes(mutated), schema=())


HEAD = b"I" + struct.pack("!I", 16385) + b"N"
FIVE = struct.pack("!h", 5)


@pytest.mark.parametrize(
    "tuple_bytes",
    [
        struct.pack("!h", 4) + b"n" * 4,
        struct.pack("!h", 6) + b"n" * 6,
        struct.pack("!h", -1),
        struct.pack("!h", 32767),
        FIVE + b"n" * 4,
        FIVE + b"n" * 6,
        FIVE + b"n" * 4 + b"t" + struct.pack("!i", -1),
        FIVE + b"n" * 4 + b"t" + struct.pack("!i", 2**31 - 1),
        FIVE + b"n" * 4 + b"t" + struct.pack("!i", -(2**31)),
        FIVE + b"n" * 4 + b"t" + struct.pack("!i", 1),
        FIVE + b"n" * 4 + b"t\0\0",
        FIVE + b"n" * 4 + b"b" + struct.pack("!i", 0),
    ],
    ids=range(12),
)
def test_a_tuple_that_does_not_fit_is_refused_by_name(tuple_bytes: bytes) -> None:
    [changes] = decode(SHAPE + begin() + xlog(HEAD + tuple_bytes) + commit())
    for form in (changes.rows, lambda: changes.envelope("0"), lambda: changes.json_lines("0", SOURCE)):
        with pytest.raises(TailraceError) as caught:
            form()
        assert caught.value.kind is Kind.DECODE_FAILED
        assert caught.value.context["table"] == "public.orders"


@pytest.mark.parametrize(
    ("rows", "text"),
    [(1, b""), (1, b"1\n"), (1, b"1\t2\t3\t4\t5\t6\n"), (1, b"1\t2\t3\t4\t5"), (1, b"1\t2\t3\t4\t\\\n"),
     (2, b"1\t2\t3\t4\t5\n"), (0, b"1\t2\t3\t4\t5\n"), (2**32 - 1, b"1\t2\t3\t4\t5\n"), (2**31, b"")],
)  # fmt: skip
def test_copy_text_that_does_not_fit_is_refused(rows: int, text: bytes) -> None:
    data = SHAPE + snapshot(frames.snapshot_frame(16385, 0, rows, text))
    with pytest.raises(TailraceError) as caught:
        rows_of(data)
    assert caught.value.kind in REFUSED


def test_counts_without_bytes_behind_them_allocate_no_memory() -> None:
    wide = relation(columns=[(f"c{n}", 25, -1) for n in range(1600)], key=())
    short = b"".join(xlog(HEAD + struct.pack("!h", 1600) + b"n") for _ in range(20_000))
    many = frames.snapshot_frame(16385, 0, 2**32 - 1, b"\n" * 1000)
    lying = (
        wide
        + begin()
        + xlog(b"T" + struct.pack("!iB", 2**31 - 1, 0) + struct.pack("!I", 16385) * 9)
        + commit()
    )
    for data in (wide + begin() + short + commit(), SHAPE + snapshot(many), lying):
        tracemalloc.start()
        with pytest.raises(TailraceError):
            rows_of(data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64 << 20


@pytest.mark.slow
def test_cells_of_truncates_are_created_a_bounded_number_at_a_time() -> None:
    """They have no bytes, so nothing else limits them."""
    wide = relation(columns=[(f"c{n}", 25, -1) for n in range(1600)], key=())
    found = decode_block(
        block(wide + transaction(*(truncate(*[16385] * 1000) for _ in range(20)))), 0, None, ()
    )
    assert sum(changes.count for changes in found) == 20_000
    while found:
        tracemalloc.start()
        found.pop().tuples()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64 << 20


def test_a_relation_message_cut_anywhere_is_refused() -> None:
    payload = relation()[XLOG_PAYLOAD_AT:]
    assert parse_relation(payload).table == "orders"
    for size in range(len(payload)):
        with pytest.raises(TailraceError) as caught:
            parse_relation(payload[:size])
        assert caught.value.kind is Kind.PROTOCOL_VIOLATION


@given(st.binary(max_size=200))
def test_random_relation_messages_are_survived(rest: bytes) -> None:
    try:
        parse_relation(b"R" + rest)
    except TailraceError as error:
        require_named(error)


@pytest.mark.parametrize("count", [-1, -32768, 1665, 32767])
def test_an_impossible_number_of_columns_is_refused(count: int) -> None:
    with pytest.raises(TailraceError, match="number of columns"):
        parse_relation(b"R" + bytes(4) + b"public\0t\0d" + struct.pack("!h", count) + bytes(100))


def test_two_columns_of_one_name_are_refused() -> None:
    frame = relation(columns=[("a", 25, -1), ("a", 25, -1)])
    with pytest.raises(TailraceError, match="two columns have one name"):
        parse_relation(frame[XLOG_PAYLOAD_AT:])


@pytest.mark.parametrize(
    "content",
    [
        b"[]",
        b"{}",
        b'{"relation": "x"}',
        b'{"relation": null}',
        b'{"relation":1,"primary_key":[1]}',
        b'{"relation":16385,"primary_key":"id"}',
        b"\xff",
    ],
)
def test_invalid_facts_are_refused(content: bytes) -> None:
    frame = struct.pack("!ciccQq", b"d", 22 + len(content), b"x", b"F", 0, 0) + content
    survive(SHAPE + frame + transaction(insert(None, None, None, None, None)))


def test_errors_hold_no_row_contents() -> None:
    data = SHAPE + begin() + xlog(HEAD + cells(["1", "hunter2", None, None]))
    [changes] = decode(data)
    with pytest.raises(TailraceError) as caught:
        changes.rows()
    assert "hunter2" not in str(caught.value)


def test_the_memory_after_a_block_is_not_read() -> None:
    # The block is a view that ends in the middle of a larger buffer.
    data = SHAPE + begin() + insert("1", "note", None, None, None)
    buffer = np.frombuffer(data + b"\xff" * 64, np.uint8)
    [changes] = decode_block(buffer[: len(data)], 0, None, [])
    assert changes.rows().column("note").to_pylist() == ["note"]
