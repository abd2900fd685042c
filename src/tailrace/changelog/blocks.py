"""Encodes chunks of frames as blocks, and the headers and footers of segments. Pure.

A `Place` is the state that the next block must continue. Encoding takes one and returns the
next one, which the writer adopts only when the bytes are written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tailrace.changelog import format as codec
from tailrace.changelog.format import BlockHeader, BlockRef, SegmentHeader, Tail
from tailrace.changelog.runs import encode_footer
from tailrace.protocol import frames
from tailrace.protocol.frames import Bytes, Numbers, OpenUnit, Summary

#: Smallest payload that is compressed, in bytes: below that the codec's call costs more than it saves.
COMPRESS_BYTES_MIN = 512


class Place(NamedTuple):
    """The end of the log after a block."""

    offset: int
    chain: int  # header CRC of the block
    position: int
    position_time_us: int
    time_max_us: int
    unit: OpenUnit | None  # the unit that is open here

    def scan_state(self) -> Numbers:
        return frames.state_within(self.unit, self.position, self.position_time_us)


class Encoded(NamedTuple):
    """Encoded blocks, to be written one after another."""

    parts: list[codec.Payload]  # header, payload, header, payload …
    headers: list[BlockHeader]
    after: Place
    tail: Tail | None  # the last boundary among them
    size_to_tail: int  # bytes on disk up to it


def up_to_boundary(chunk: Bytes, summary: Summary) -> list[tuple[Bytes, Summary]]:
    """Return a chunk as it is, or split after its last boundary."""
    head = summary.to_boundary
    if head is None:
        return [(chunk, summary)]
    rest = chunk[head.size :]
    after = frames.summarise(rest, frames.new_state(head.position, head.position_time_us))
    return [(chunk[: head.size], head), (rest, after)]


class Encoder:
    """An encoder of one task's blocks, for one epoch and compression; a snapshot's are not compressed."""

    def __init__(self, log_id: str, task: str, epoch: int, compression: str) -> None:
        self._log_id = bytes.fromhex(log_id)
        self._seed = codec.seed_of(log_id, task)
        self._epoch = epoch
        self._codec = codec.CODECS.index(compression)

    def blocks(self, chunks: Sequence[tuple[Bytes, Summary]], place: Place) -> Encoded:
        """Return a block for each chunk, which comes with its summary."""
        parts: list[codec.Payload] = []
        headers: list[BlockHeader] = []
        size = size_to_tail = 0
        tail = None
        for raw, summary in chunks:
            header, stored = self._block(raw, summary, place)
            packed, crc = codec.encode_block_header(header, self._seed)
            parts += (packed, stored)
            headers.append(header._replace(crc=crc))
            size += len(packed) + len(stored)
            place = Place(
                place.offset + summary.size,
                crc,
                summary.position,
                summary.position_time_us,
                header.time_max_us,
                summary.open_at_end,
            )
            if summary.units:
                tail = Tail(place.offset, place.position, place.position_time_us)
                size_to_tail = size
        return Encoded(parts, headers, place, tail, size_to_tail)

    def _block(self, raw: Bytes, summary: Summary, place: Place) -> tuple[BlockHeader, codec.Payload]:
        unit = summary.open_at_start
        in_snapshot = unit is not None and unit.kind == frames.SNAPSHOT_OPEN
        chosen = 0 if in_snapshot or len(raw) < COMPRESS_BYTES_MIN else self._codec
        stored = codec.compress(raw, chosen)
        if len(stored) >= len(raw):
            chosen, stored = 0, raw
        header = BlockHeader(
            preamble=False,
            has_schema=summary.has_schema,
            codec=chosen,
            epoch=self._epoch,
            log_offset=place.offset,
            raw_size=len(raw),
            stored_size=len(stored),
            rows=summary.rows,
            units=summary.units,
            chain=place.chain,
            position_at_start=place.position,
            position=summary.position,
            position_time_at_start_us=place.position_time_us,
            position_time_us=summary.position_time_us,
            # Commit times do not always increase in commit order, so the last may not be the largest.
            time_max_us=max(place.time_max_us, summary.time_max_us) if summary.units else place.time_max_us,
            open_at_start=summary.open_at_start,
            open_at_end=summary.open_at_end,
            tables=summary.tables,
            payload_crc=codec.checksum(stored, self._seed),
            crc=0,
        )
        return header, stored

    def head(self, schema: Mapping[str, bytes], place: Place, created_us: int) -> tuple[list[bytes], Place]:
        """Return a segment's header and preamble, and the place after them, with another chain."""
        header, crc = codec.encode_segment_header(
            SegmentHeader(
                log_id=self._log_id,
                epoch=self._epoch,
                first_offset=place.offset,
                position=place.position,
                position_time_us=place.position_time_us,
                time_max_us=place.time_max_us,
                created_us=created_us,
                chain=place.chain,
                crc=0,
            ),
            self._seed,
        )
        payload = b"".join(schema.values())
        packed, chain = codec.encode_block_header(
            BlockHeader(
                preamble=True,
                has_schema=bool(payload),
                codec=0,
                epoch=self._epoch,
                log_offset=place.offset,
                raw_size=len(payload),
                stored_size=len(payload),
                rows=0,
                units=0,
                chain=crc,
                position_at_start=place.position,
                position=place.position,
                position_time_at_start_us=place.position_time_us,
                position_time_us=place.position_time_us,
                time_max_us=place.time_max_us,
                open_at_start=place.unit,
                open_at_end=place.unit,
                tables=(),
                payload_crc=codec.checksum(payload, self._seed),
                crc=0,
            ),
            self._seed,
        )
        return [header, packed, payload], place._replace(chain=chain)

    def footer(self, refs: list[BlockRef], place: Place) -> bytes:
        """Return the footer of a segment with these runs, which ends at `place`."""
        return encode_footer(refs, place.offset, place.chain, self._seed)
