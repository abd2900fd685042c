"""Runs of blocks, and the footer that lists them: the index of a segment. Pure.

If every transaction has its own block, an index of the blocks is as large as the log itself.
So consecutive blocks are indexed, planned and read as one *run*. The end of a run is a function
of the blocks' sizes alone, from the segment's start on: so the writer, the footer and a walk over
the blocks have the same runs.

    footer   magic, runs, raw size, stored size, end offset, chain | entries, compressed | trailer
    trailer  the footer's length, CRC of all of the footer before the CRC
"""

from __future__ import annotations

import struct

import crc32c
import pyarrow as pa

from tailrace.changelog.format import (
    UNIT,
    BlockHeader,
    BlockRef,
    DamageError,
    RunHeader,
    unit_fields,
    unit_of,
)
from tailrace.protocol.frames import TABLES_LISTED_MAX

#: Largest size of a run of several blocks, in raw bytes.
RUN_BYTES_MAX = 1 << 20

FOOTER_MAGIC = b"TLf\x01"
_HEAD = struct.Struct("<4sIIIQI")
_TRAILER = struct.Struct("<II")
# blocks, size on disk, has schema, tables (-1: not listed), log offset, raw size, rows, units,
# boundary, position before and after, its time before and after, largest time, CRC, units open
_ENTRY = struct.Struct("<IQ?hQIIIqQQqqqI" + UNIT + UNIT)
TRAILER_SIZE = _TRAILER.size


class RunBuilder:
    """Groups the blocks of one segment, in order, into runs."""

    def __init__(self, segment: str) -> None:
        self._segment = segment
        self._closed: list[BlockRef] = []
        self._file_at = self._size_on_disk = self._blocks = 0
        self._raw_size = self._rows = self._units = 0
        self._boundary, self._has_schema = -1, False
        self._tables: set[int] | None = set()
        self._first: BlockHeader | None = None
        self._last: BlockHeader | None = None

    def add(self, file_at: int, header: BlockHeader) -> None:
        """Add the next block, which starts at byte `file_at` of the file and is not the preamble."""
        if self._first is not None and self._raw_size + header.raw_size > RUN_BYTES_MAX:
            self._closed.append(self._current())
            self._first = None
        if self._first is None:
            self._first, self._file_at = header, file_at
            self._blocks = self._size_on_disk = self._raw_size = self._rows = self._units = 0
            self._boundary, self._has_schema, self._tables = -1, False, set()
        self._last = header
        self._blocks += 1
        self._size_on_disk += header.size_on_disk
        self._raw_size += header.raw_size
        self._rows += header.rows
        self._units += header.units
        self._has_schema |= header.has_schema
        if header.units:
            self._boundary = header.end
        if header.tables is None:
            self._tables = None
        elif self._tables is not None:
            self._tables.update(header.tables)
            if len(self._tables) > TABLES_LISTED_MAX:
                self._tables = None

    def refs(self) -> list[BlockRef]:
        """Return the runs so far; the last one may still grow."""
        return [*self._closed, self._current()] if self._first is not None else list(self._closed)

    def _current(self) -> BlockRef:
        first, last = self._first, self._last
        assert first is not None
        assert last is not None
        header = RunHeader(
            has_schema=self._has_schema,
            log_offset=first.log_offset,
            raw_size=self._raw_size,
            rows=self._rows,
            units=self._units,
            boundary=self._boundary,
            position_at_start=first.position_at_start,
            position=last.position,
            position_time_at_start_us=first.position_time_at_start_us,
            position_time_us=last.position_time_us,
            time_max_us=last.time_max_us,
            open_at_start=first.open_at_start,
            open_at_end=last.open_at_end,
            tables=None if self._tables is None else tuple(sorted(self._tables)),
            crc=last.crc,
        )
        return BlockRef(self._segment, self._file_at, header, self._blocks, self._size_on_disk)


def encode_footer(refs: list[BlockRef], end: int, chain: int, seed: int) -> bytes:
    """Return the footer of a segment that ends at log offset `end`, after a block whose header
    CRC is `chain`.
    """
    entries = b"".join(_encode_entry(ref) for ref in refs)
    stored: bytes = pa.Codec("zstd").compress(entries, asbytes=True)
    size = _HEAD.size + len(stored) + TRAILER_SIZE
    body = (
        _HEAD.pack(FOOTER_MAGIC, len(refs), len(entries), len(stored), end, chain)
        + stored
        + size.to_bytes(4, "little")
    )
    return body + crc32c.crc32c(body, seed).to_bytes(4, "little")


def footer_size(trailer: bytes) -> int:
    """Return the size in bytes of the footer with this trailer, as the trailer says."""
    size: int = _TRAILER.unpack(trailer)[0]
    return size


def decode_footer(data: bytes, segment: str, footer_at: int, seed: int) -> tuple[list[BlockRef], int]:
    """Return the runs that a footer lists, and the log offset at which its segment ends.

    :param footer_at: the byte of the segment's file at which the footer starts and the last run ends.
    :raises DamageError: if it is truncated or changed.
    """
    if len(data) < _HEAD.size + TRAILER_SIZE:
        raise DamageError("the footer is truncated")
    magic, count, raw_size, stored_size, end, _ = _HEAD.unpack_from(data)
    size, crc = _TRAILER.unpack_from(data, len(data) - TRAILER_SIZE)
    if magic != FOOTER_MAGIC or size != len(data):
        raise DamageError("no footer starts where the trailer says")
    if crc32c.crc32c(data[:-4], seed) != crc:
        raise DamageError("the footer does not match its checksum")
    stored = data[_HEAD.size : _HEAD.size + stored_size]
    entries = pa.Codec("zstd").decompress(stored, raw_size, asbytes=True)
    placed: list[BlockRef] = []
    at = 0
    for _ in range(count):
        ref, at = _decode_entry(entries, at, segment)
        placed.append(ref)
    run_at = footer_at - sum(ref.size_on_disk for ref in placed)
    for index, ref in enumerate(placed):
        placed[index] = ref._replace(file_at=run_at)
        run_at += ref.size_on_disk
    return placed, end


def _encode_entry(ref: BlockRef) -> bytes:
    h = ref.header
    tables = h.tables or ()
    packed = _ENTRY.pack(
        ref.blocks,
        ref.size_on_disk,
        h.has_schema,
        -1 if h.tables is None else len(tables),
        *h[1:11],
        h.crc,
        *unit_fields(h.open_at_start),
        *unit_fields(h.open_at_end),
    )
    return packed + struct.pack(f"<{len(tables)}I", *tables)


def _decode_entry(entries: bytes, at: int, segment: str) -> tuple[BlockRef, int]:
    blocks, size_on_disk, has_schema, table_count, *fields = _ENTRY.unpack_from(entries, at)
    at += _ENTRY.size
    tables: tuple[int, ...] | None = None
    if table_count >= 0:
        tables = struct.unpack_from(f"<{table_count}I", entries, at)
        at += 4 * table_count
    header = RunHeader._make(
        (has_schema, *fields[:10], unit_of(fields[11:16]), unit_of(fields[16:21]), tables, fields[10])
    )
    return BlockRef(segment, 0, header, blocks, size_on_disk), at
