"""The codec alone: what is encoded can be decoded, and anything else is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.changelog import format as codec
from tailrace.changelog.format import BlockHeader, DamageError, EndMark, SegmentHeader
from tailrace.changelog.runs import RUN_BYTES_MAX, RunBuilder, decode_footer, encode_footer
from tailrace.protocol.frames import TABLES_LISTED_MAX, OpenUnit

LOG_ID = "00112233445566778899aabbccddeeff"
SEED = codec.seed_of(LOG_ID, "0")

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**63 - 1)
TIME = st.integers(-(2**62), 2**62)
UNIT = st.none() | st.builds(OpenUnit, st.sampled_from([1, 2]), U32, U64, TIME, U64)
TABLES = st.none() | st.lists(U32, max_size=TABLES_LISTED_MAX).map(tuple)
HEADERS = st.builds(
    BlockHeader,
    preamble=st.booleans(),
    has_schema=st.booleans(),
    codec=st.sampled_from([0, 1, 2]),
    epoch=U64,
    log_offset=U64,
    raw_size=U32,
    stored_size=U32,
    rows=U32,
    units=U32,
    chain=U32,
    position_at_start=U64,
    position=U64,
    position_time_at_start_us=TIME,
    position_time_us=TIME,
    time_max_us=TIME,
    open_at_start=UNIT,
    open_at_end=UNIT,
    tables=TABLES,
    payload_crc=U32,
    crc=st.just(0),
)


@given(HEADERS, st.binary(max_size=20))
def test_a_block_header_is_decoded_at_any_offset(header: BlockHeader, before: bytes) -> None:
    packed, crc = codec.encode_block_header(header, SEED)
    assert codec.decode_block_header(before + packed, len(before), SEED) == header._replace(crc=crc)
    assert len(packed) == header.header_size


@given(HEADERS, st.data())
def test_a_block_header_with_one_changed_byte_is_refused(header: BlockHeader, data: st.DataObject) -> None:
    packed = bytearray(codec.encode_block_header(header, SEED)[0])
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DamageError):
        codec.decode_block_header(bytes(packed), 0, SEED)


@given(HEADERS)
def test_a_block_of_another_log_or_task_is_refused(header: BlockHeader) -> None:
    packed, _ = codec.encode_block_header(header, SEED)
    for seed in (codec.seed_of(LOG_ID[::-1], "0"), codec.seed_of(LOG_ID, "1")):
        with pytest.raises(DamageError):
            codec.decode_block_header(packed, 0, seed)


@given(U64, U64, TIME, U32)
def test_a_segment_header_is_decoded(offset: int, position: int, time_us: int, chain: int) -> None:
    header = SegmentHeader(bytes.fromhex(LOG_ID), 3, offset, position, time_us, time_us, 5, chain, 0)
    packed, crc = codec.encode_segment_header(header, SEED)
    assert len(packed) == codec.SEGMENT_HEADER_SIZE
    assert codec.decode_segment_header(packed, SEED, header.log_id) == header._replace(crc=crc)


@given(U64, U64, st.integers(-1, 2**62))
def test_an_end_mark_is_decoded(sequence: int, epoch: int, offset: int) -> None:
    mark = EndMark(sequence, epoch, offset, 17, -3)
    assert codec.decode_mark(codec.encode_mark(mark, SEED), SEED) == mark


@pytest.mark.parametrize("name", codec.CODECS)
@given(st.binary(min_size=1, max_size=3000))
def test_a_payload_is_decompressed_with_every_codec(name: str, content: bytes) -> None:
    raw = np.frombuffer(content, np.uint8)
    number = codec.CODECS.index(name)
    stored = codec.compress(raw, number)
    header = _header(0, len(raw))._replace(codec=number, stored_size=len(stored))
    restored = codec.decompress(stored, header)
    assert bytes(restored) == content
    assert not restored.flags.writeable


def test_a_payload_that_decompresses_to_another_size_is_refused() -> None:
    stored = codec.compress(np.zeros(5000, np.uint8), 2)
    with pytest.raises(DamageError):
        codec.decompress(stored, _header(0, 4999)._replace(codec=2))


@given(st.lists(st.integers(1, RUN_BYTES_MAX + 5000), max_size=12), st.data())
def test_runs_depend_on_the_blocks_alone_and_are_decoded_from_a_footer(
    sizes: list[int], data: st.DataObject
) -> None:
    headers, offset = [], 0
    for size in sizes:
        drawn = data.draw(HEADERS)._replace(rows=3, units=1, raw_size=size, stored_size=size)
        headers.append(drawn._replace(preamble=False, log_offset=offset, crc=offset % 2**32))
        offset += size
    builder, at = RunBuilder("x.seg"), 500
    for header in headers:
        builder.add(at, header)
        at += header.size_on_disk
    refs = builder.refs()
    assert sum(ref.header.raw_size for ref in refs) == sum(sizes)
    assert sum(ref.header.rows for ref in refs) == 3 * len(sizes)
    assert all(ref.blocks == 1 or ref.header.raw_size <= RUN_BYTES_MAX for ref in refs)
    footer = encode_footer(refs, offset, 7, SEED)
    assert decode_footer(footer, "x.seg", at, SEED) == (refs, offset)
    changed = bytearray(footer)
    changed[data.draw(st.integers(0, len(footer) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DamageError):
        decode_footer(bytes(changed), "x.seg", at, SEED)


def test_segment_names_sort_like_their_offsets() -> None:
    offsets = [0, 1, 255, 2**32, 2**63 - 1]
    names = [codec.segment_name(offset) for offset in offsets]
    assert names == sorted(names)
    assert [codec.segment_offset(name) for name in names] == offsets
    for strange in ("0.seg", "000000000000000G.seg", "end", ".0000000000000000.seg.1.tmp", "+" * 16 + ".seg"):
        assert codec.segment_offset(strange) is None


def _header(offset: int, size: int) -> BlockHeader:
    return BlockHeader(
        *(False, False, 0, 1, offset, size, size, 1, 1, 0, 0, 0, 0, 0, 0), None, None, (), 0, 0
    )
