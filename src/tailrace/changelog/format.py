"""The format on disk: encodes and decodes segments, blocks and the end mark. Pure.

    segment   header | preamble block | block … | footer (only once the segment is sealed)
    block     header (fixed part, tables, CRC) | payload (whole frames, optionally compressed)
    footer    an index of the segment that can be rebuilt from it: see `runs`
    end mark  how far the log is durable: two slots in a separate file

All integers are little-endian. Every CRC is CRC-32C and starts from a *seed* made of the log's
id and the task's name, so that data of another log or task never has a valid CRC here. Every byte
of every file is covered by a CRC.

The *chain*: each block has the header CRC of the block before it, the preamble that of its
segment's header, and the segment's header that of the last block of the segment before. As a
header's CRC covers its payload's CRC, one value verifies everything before it.

A *unit* is a transaction or a snapshot's chunk. The writer splits each chunk of frames after the last
unit that ends in it. So a block either ends at a boundary or contains none, and the log is cut only
between blocks.

A *preamble* repeats the schema frames in force at the segment's start. It has no size in log offsets.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import crc32c
import numpy as np
import pyarrow as pa

from tailrace.errors import Kind, TailraceError
from tailrace.protocol.frames import TABLES_LISTED_MAX, Bytes, Numbers, OpenUnit, state_within

FORMAT_VERSION = 1
SEGMENT_SUFFIX = ".seg"

#: Largest raw size of a block, in bytes; larger than any frame that PostgreSQL sends.
BLOCK_BYTES_MAX = 0x7FFF_FFFF

_SEGMENT_MAGIC = b"TLRSEG\r\n"
BLOCK_MAGIC = b"TLb\x01"
_MARK_MAGIC = b"TLe\x01"

# magic, version, reserved, log id, epoch, first offset, position, its time, largest time,
# created, chain; then the CRC
_SEGMENT = struct.Struct("<8sHH16sQQQqqqI")
UNIT = "BIQqQ"  # kind, xid, commit lsn, commit time, ordinal
# magic, length, flags, codec, epoch, log offset, raw size, stored size, rows, units, chain,
# position before and after, its time before and after, largest time, unit before and after,
# tables, payload CRC; then the tables and the CRC
_BLOCK = struct.Struct("<4sHBBQQIIIIIQQqqq" + UNIT + UNIT + "HI")
_MARK = struct.Struct("<4sQQqQq")  # magic, sequence, epoch, offset, position, its time
_CRC = struct.Struct("<I")

SEGMENT_HEADER_SIZE = _SEGMENT.size + _CRC.size
BLOCK_HEADER_SIZE_MIN = _BLOCK.size + _CRC.size
BLOCK_HEADER_SIZE_MAX = BLOCK_HEADER_SIZE_MIN + 4 * TABLES_LISTED_MAX
MARK_SLOT_SIZE = _MARK.size + _CRC.size
MARK_FILE_SIZE = 2 * MARK_SLOT_SIZE

_PREAMBLE, _HAS_SCHEMA, _TABLES_UNLISTED = 1, 2, 4
Payload = Bytes | bytes | memoryview
CODECS = ("none", "lz4", "zstd")
_ARROW_CODEC = {"lz4": "lz4_raw", "zstd": "zstd"}
_NO_UNIT = (0, 0, 0, 0, 0)


class DamageError(ValueError):
    """Damaged bytes in a file of the log; the message describes the damage."""


class SegmentHeader(NamedTuple):
    """The header of a segment: its start in the log and in the source, and the chain."""

    log_id: bytes
    epoch: int
    first_offset: int
    position: int
    position_time_us: int
    time_max_us: int
    created_us: int  # wall clock; informative
    chain: int
    crc: int


class BlockHeader(NamedTuple):
    """The header of a block: describes it without its payload.

    `epoch` is that of the writer. `time_max_us` is the largest commit time in the log up to
    the block's end: unlike commit times it never decreases, so it can be searched. `tables` are
    relation oids; `None`: too many to list, so the block may have rows of any table.
    """

    preamble: bool
    has_schema: bool
    codec: int  # index in CODECS
    epoch: int
    log_offset: int
    raw_size: int
    stored_size: int
    rows: int
    units: int  # units that end here
    chain: int
    position_at_start: int
    position: int
    position_time_at_start_us: int
    position_time_us: int
    time_max_us: int
    open_at_start: OpenUnit | None
    open_at_end: OpenUnit | None
    tables: tuple[int, ...] | None
    payload_crc: int
    crc: int  # of the header itself; the next block's `chain`

    @property
    def end(self) -> int:
        """Log offset after the block."""
        return self.log_offset if self.preamble else self.log_offset + self.raw_size

    @property
    def boundary(self) -> int:
        """Log offset of the last boundary in the block, which is its end; -1: it has none."""
        return self.end if self.units else -1

    @property
    def header_size(self) -> int:
        return BLOCK_HEADER_SIZE_MIN + 4 * len(self.tables or ())

    @property
    def size_on_disk(self) -> int:
        return self.header_size + self.stored_size


class RunHeader(NamedTuple):
    """A summary of a run of consecutive blocks, with the same fields as for one block.

    `boundary` is the log offset of the last boundary in the run (-1: none), which may lie before
    its end. `crc` is the last block's header CRC, which verifies the whole run.
    """

    has_schema: bool
    log_offset: int
    raw_size: int
    rows: int
    units: int
    boundary: int
    position_at_start: int
    position: int
    position_time_at_start_us: int
    position_time_us: int
    time_max_us: int
    open_at_start: OpenUnit | None
    open_at_end: OpenUnit | None
    tables: tuple[int, ...] | None
    crc: int

    @property
    def end(self) -> int:
        """Log offset after the run."""
        return self.log_offset + self.raw_size

    def state_at_start(self) -> Numbers:
        """Return the scan state with which `frames.units_of` reads the run's frames."""
        return state_within(self.open_at_start, self.position_at_start, self.position_time_at_start_us)


class BlockRef(NamedTuple):
    """A reference to a run of blocks, which is planned and read as a whole. Picklable."""

    segment: str  # file name
    file_at: int
    header: RunHeader
    blocks: int
    size_on_disk: int


class HeldBlock(NamedTuple):
    """A block of the log in this process's memory, used like a `BlockRef` without reading files.

    `frames` are read-only and not shared; `schema` has the schema frames in force at its start, by key.
    """

    header: BlockHeader
    frames: Bytes
    schema: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Tail:
    """An end of the log at a boundary: everything up to `position` lies before `offset`."""

    offset: int
    position: int
    position_time_us: int


class EndMark(NamedTuple):
    """How far the log is durable, and the writer's epoch. `offset` is a boundary; -1: not known."""

    sequence: int
    epoch: int
    offset: int
    position: int
    position_time_us: int


def seed_of(log_id: str, task: str) -> int:
    """Return the initial value of the CRCs in one task's files."""
    return crc32c.crc32c(bytes.fromhex(log_id) + task.encode())


def segment_name(first_offset: int) -> str:
    """Return the file name of the segment that starts at a log offset."""
    return f"{first_offset:016x}{SEGMENT_SUFFIX}"


def segment_offset(name: str) -> int | None:
    """Return the log offset in a segment's file name; `None` if it is not a segment's name."""
    digits = name.removesuffix(SEGMENT_SUFFIX)
    if len(digits) != 16 or digits == name or set(digits) - set("0123456789abcdef"):
        return None
    return int(digits, 16)


def encode_segment_header(header: SegmentHeader, seed: int) -> tuple[bytes, int]:
    """Return the header's bytes and its CRC; `header.crc` is ignored."""
    packed = _SEGMENT.pack(_SEGMENT_MAGIC, FORMAT_VERSION, 0, *header[:-1])
    crc = crc32c.crc32c(packed, seed)
    return packed + _CRC.pack(crc), crc


def decode_segment_header(data: bytes, seed: int, log_id: bytes) -> SegmentHeader:
    """Return the segment header in `data`.

    :raises DamageError: if it is truncated, changed, or of another log or task.
    :raises TailraceError: `LOG_FORMAT_UNKNOWN`, if a later version wrote it.
    """
    if len(data) < SEGMENT_HEADER_SIZE:
        raise DamageError("the segment's header is truncated")
    magic, version, reserved, found_id, *rest = _SEGMENT.unpack_from(data)
    (crc,) = _CRC.unpack_from(data, _SEGMENT.size)
    if magic != _SEGMENT_MAGIC:
        raise DamageError("this is not a segment: its first bytes are not a segment's")
    if crc32c.crc32c(data[: _SEGMENT.size], seed) != crc:
        raise DamageError("the segment's header does not match its checksum")
    if version != FORMAT_VERSION:
        raise TailraceError(
            Kind.LOG_FORMAT_UNKNOWN,
            f"read a segment: its format is {version}, this version knows {FORMAT_VERSION}",
            "read the log with the version of tailrace that wrote it",
        )
    if found_id != log_id or reserved:
        raise DamageError("the segment belongs to another log")
    return SegmentHeader._make((found_id, *rest, crc))


def encode_block_header(header: BlockHeader, seed: int) -> tuple[bytes, int]:
    """Return the header's bytes and its CRC; `header.crc` is ignored."""
    h = header
    tables = h.tables or ()
    flags = h.preamble * _PREAMBLE | h.has_schema * _HAS_SCHEMA
    if h.tables is None:
        flags |= _TABLES_UNLISTED
    packed = _BLOCK.pack(
        BLOCK_MAGIC,
        BLOCK_HEADER_SIZE_MIN + 4 * len(tables),
        flags,
        h.codec,
        *h[3:15],
        *unit_fields(h.open_at_start),
        *unit_fields(h.open_at_end),
        len(tables),
        h.payload_crc,
    )
    if tables:
        packed += struct.pack(f"<{len(tables)}I", *tables)
    crc = crc32c.crc32c(packed, seed)
    return packed + _CRC.pack(crc), crc


def decode_block_header(data: bytes | memoryview, at: int, seed: int) -> BlockHeader:
    """Return the block header that starts at `data[at]`.

    :raises DamageError: if there is no complete and unchanged header of this log.
    """
    if len(data) - at < BLOCK_HEADER_SIZE_MIN:
        raise DamageError("a block's header is truncated")
    magic, length, flags, codec, *fields = _BLOCK.unpack_from(data, at)
    table_count, payload_crc = fields[-2:]
    if magic != BLOCK_MAGIC:
        raise DamageError("no block starts here")
    if table_count > TABLES_LISTED_MAX or length != BLOCK_HEADER_SIZE_MIN + 4 * table_count:
        raise DamageError("a block's header has an impossible length")
    if length > len(data) - at:
        raise DamageError("a block's header is truncated")
    crc_at = at + length - _CRC.size
    (crc,) = _CRC.unpack_from(data, crc_at)
    if crc32c.crc32c(data[at:crc_at], seed) != crc:
        raise DamageError("a block's header does not match its checksum")
    if codec >= len(CODECS):
        raise DamageError(f"a block is compressed with the unknown codec {codec}")
    tables: tuple[int, ...] | None = struct.unpack_from(f"<{table_count}I", data, at + _BLOCK.size)
    return BlockHeader._make(
        (
            bool(flags & _PREAMBLE),
            bool(flags & _HAS_SCHEMA),
            codec,
            *fields[:12],
            unit_of(fields[12:17]),
            unit_of(fields[17:22]),
            None if flags & _TABLES_UNLISTED else tables,
            payload_crc,
            crc,
        )
    )


def unit_fields(unit: OpenUnit | None) -> tuple[int, int, int, int, int]:
    """Return an open unit as the fields of `UNIT`."""
    if unit is None:
        return _NO_UNIT
    return unit.kind, unit.xid, unit.commit_lsn, unit.commit_time_us, unit.ordinal


def unit_of(fields: list[int]) -> OpenUnit | None:
    """Return the open unit of these fields of `UNIT`; None if no unit is open."""
    return OpenUnit(*fields) if fields[0] else None


def checksum(data: Payload, seed: int) -> int:
    """Return the CRC of a payload."""
    return crc32c.crc32c(data, seed)  # type: ignore[arg-type]  # numpy's types hide the buffer


def compress(raw: Bytes, codec: int) -> Payload:
    """Return the payload to store for `raw`; with codec 0 it is `raw` itself, not a copy."""
    if codec == 0:
        return raw
    packed: bytes = pa.Codec(_ARROW_CODEC[CODECS[codec]]).compress(raw, asbytes=True)
    return packed


def decompress(stored: Payload, header: BlockHeader) -> Bytes:
    """Return a block's raw frames, read-only; the caller has checked the CRC.

    :raises DamageError: if the payload does not decompress to the size in the header.
    """
    if header.codec == 0:
        raw = np.frombuffer(stored, np.uint8)
    else:
        codec = pa.Codec(_ARROW_CODEC[CODECS[header.codec]])
        try:
            raw = np.frombuffer(codec.decompress(stored, header.raw_size), np.uint8)
        except (pa.ArrowInvalid, OSError) as error:
            raise DamageError(f"a block does not decompress: {error}") from None
    if len(raw) != header.raw_size:
        raise DamageError("a block's size does not match its header")
    raw.flags.writeable = False
    return raw


def encode_mark(mark: EndMark, seed: int) -> bytes:
    """Return one slot of the end mark."""
    packed = _MARK.pack(_MARK_MAGIC, *mark)
    return packed + _CRC.pack(crc32c.crc32c(packed, seed))


def decode_mark(slot: bytes, seed: int) -> EndMark:
    """Return the mark in one slot.

    :raises DamageError: if it is truncated or changed.
    """
    if len(slot) != MARK_SLOT_SIZE:
        raise DamageError("the end mark is truncated")
    magic, *fields = _MARK.unpack_from(slot)
    if magic != _MARK_MAGIC or crc32c.crc32c(slot[: _MARK.size], seed) != _CRC.unpack(slot[_MARK.size :])[0]:
        raise DamageError("the end mark does not match its checksum")
    return EndMark(*fields)
