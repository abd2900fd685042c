"""The index of a segment's blocks, from its footer or from a walk over its block headers.

The footer is a cache. If it is missing, truncated or changed, the walk has the same result. A
segment that is not the last ends where the next one starts; bytes after that in its file are
ignored, as a fenced writer may have left them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tailrace.changelog import format as codec
from tailrace.changelog import runs
from tailrace.changelog.durable import read_fully
from tailrace.changelog.format import BlockHeader, BlockRef, DamageError, SegmentHeader
from tailrace.errors import Kind, TailraceError
from tailrace.protocol.frames import Bytes
from tailrace.protocol.metadata_frames import schema_frames

_WALK_READ = 1 << 16
_SEARCH_READ = 1 << 20


class DamageAtError(DamageError):
    """Damage, with the byte of the file at which it starts."""

    def __init__(self, what: str, file_at: int) -> None:
        super().__init__(what)
        self.file_at = file_at


class Block(NamedTuple):
    """A block's header and the byte of the segment's file at which the block starts."""

    file_at: int
    header: BlockHeader


@dataclass(slots=True)
class Walk:
    """The state of a walk over blocks, which the next block must continue."""

    file_at: int
    offset: int
    chain: int
    position: int
    expects_preamble: bool = False


@dataclass(slots=True)
class SegmentFile:
    """A segment opened for reading; the caller closes it. Threads may share it: reads name their offset."""

    path: Path
    fd: int
    header: SegmentHeader
    seed: int

    @classmethod
    def open(cls, path: Path, seed: int, log_id: bytes) -> SegmentFile:
        """Open a segment and read its header.

        :raises DamageError: if the header is damaged or does not match the file's name.
        :raises FileNotFoundError: if retention or a cut has removed it.
        """
        fd = os.open(path, os.O_RDONLY)
        try:
            data = read_fully(fd, codec.SEGMENT_HEADER_SIZE, 0)
            header = codec.decode_segment_header(data, seed, log_id)
            if codec.segment_name(header.first_offset) != path.name:
                raise DamageError("the segment's name is not the offset in its header")
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, header, seed)

    def close(self) -> None:
        os.close(self.fd)

    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def start(self) -> Walk:
        """Return a walk that starts with the preamble."""
        h = self.header
        return Walk(codec.SEGMENT_HEADER_SIZE, h.first_offset, h.crc, h.position, expects_preamble=True)

    def payload(self, block: Block) -> Bytes:
        """Return a block's raw frames, read-only, after checking their checksum.

        :raises DamageError: if they do not match the header.
        """
        header = block.header
        stored = read_fully(self.fd, header.stored_size, block.file_at + header.header_size)
        return payload_of(stored, header, self.seed)


def payload_of(stored: codec.Payload, header: BlockHeader, seed: int) -> Bytes:
    """Return the raw frames of a block from the bytes stored after its header.

    :raises DamageError: if they do not match the header.
    """
    if len(stored) < header.stored_size:
        raise DamageError("a block's frames are truncated")
    if codec.checksum(stored, seed) != header.payload_crc:
        raise DamageError("a block's frames do not match their checksum")
    return codec.decompress(stored, header)


def corrupt(path: Path, file_at: int, what: str, hint: str = "") -> TailraceError:
    """Return the error for damage found at a byte of a file of the log."""
    return TailraceError(
        Kind.LOG_CORRUPT,
        f"read the change log: {what}",
        hint
        or "restore this file from a backup of the log, or set the log aside and take a new "
        "snapshot; nothing was skipped or changed. `tailrace log verify` lists all damage",
        {"file": str(path), "byte": file_at},
    )


def walk_blocks(
    file: SegmentFile, walk: Walk, until: int | None, *, payloads: bool = False
) -> Iterator[Block]:
    """Yield the blocks that continue `walk`, including the preamble; `walk` advances with each block.

    Ends at log offset `until`; with `None` at the end of the file or at a sound footer.

    :param payloads: also read each block's frames and check them.
    :raises DamageError: at the first bytes that are not the next block; `walk.file_at` is their place.
    """
    window, window_at = b"", 0
    size = file.size()
    while walk.expects_preamble or until is None or walk.offset < until:
        if not walk.expects_preamble and (walk.file_at >= size or footer_starts(file, walk.file_at)):
            if until is None:
                return
            raise DamageError(f"it ends at log offset {walk.offset}, but {until} was expected")
        if walk.file_at + codec.BLOCK_HEADER_SIZE_MAX > window_at + len(window):
            window, window_at = read_fully(file.fd, _WALK_READ, walk.file_at), walk.file_at
        header = codec.decode_block_header(window, walk.file_at - window_at, file.seed)
        _check_follows(header, walk, file.header.epoch)
        block = Block(walk.file_at, header)
        if block.file_at + header.size_on_disk > size:
            raise DamageError("a block's frames are truncated")
        if payloads:
            file.payload(block)
        walk.file_at += header.size_on_disk
        walk.offset, walk.chain, walk.position = header.end, header.crc, header.position
        walk.expects_preamble = False
        yield block


def _check_follows(header: BlockHeader, walk: Walk, epoch: int) -> None:
    if header.preamble != walk.expects_preamble:
        raise DamageError("the preamble is not the first block")
    if header.epoch != epoch:
        raise DamageError(f"a block has epoch {header.epoch} in a segment of epoch {epoch}")
    if header.log_offset != walk.offset:
        raise DamageError(f"a block has log offset {header.log_offset}, expected {walk.offset}")
    if header.chain != walk.chain:
        raise DamageError("a block does not continue the block before it")
    if header.position_at_start != walk.position or header.position < walk.position:
        raise DamageError("a block's source position does not continue that of the block before it")


def footer_starts(file: SegmentFile, at: int) -> bool:
    """Return whether a sound footer starts at byte `at` of the file and ends with the file."""
    if os.pread(file.fd, len(runs.FOOTER_MAGIC), at) != runs.FOOTER_MAGIC:
        return False
    try:
        return read_footer(file)[2] == at
    except DamageError:
        return False


def footer_remains(file: SegmentFile, at: int) -> bool:
    """Return whether a footer, sound or damaged, starts at byte `at` of the file."""
    size = file.size()
    trailer = read_fully(file.fd, runs.TRAILER_SIZE, max(size - runs.TRAILER_SIZE, 0))
    return os.pread(file.fd, len(runs.FOOTER_MAGIC), at) == runs.FOOTER_MAGIC or (
        len(trailer) == runs.TRAILER_SIZE and size - runs.footer_size(trailer) == at
    )


def read_footer(file: SegmentFile) -> tuple[list[BlockRef], int, int]:
    """Return the runs that a sealed segment's footer lists, the log offset at which the segment
    ends, and the byte of the file at which the footer starts.

    :raises DamageError: if the segment has no sound footer.
    """
    size = file.size()
    trailer = read_fully(file.fd, runs.TRAILER_SIZE, max(size - runs.TRAILER_SIZE, 0))
    footer_at = size - runs.footer_size(trailer) if len(trailer) == runs.TRAILER_SIZE else -1
    if footer_at < codec.SEGMENT_HEADER_SIZE:
        raise DamageError("the segment has no footer")
    data = read_fully(file.fd, size - footer_at, footer_at)
    refs, end = runs.decode_footer(data, file.path.name, footer_at, file.seed)
    return refs, end, footer_at


class SegmentIndex:
    """The runs of one segment up to a log offset, which increases while the segment is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.refs: list[BlockRef] = []
        self.preamble: dict[str, bytes] = {}  # schema frames in force at the start, by key
        #: Schema frames of runs that have any, by (byte of the file, number of blocks).
        self.schemas: dict[tuple[int, int], list[tuple[str, bytes]]] = {}
        self._builder = runs.RunBuilder(path.name)
        self._walk: Walk | None = None  # None: nothing is indexed yet

    def extend(self, until: int, seed: int, log_id: bytes) -> None:
        """Index the segment up to log offset `until`, from the footer or by continuing the walk.

        :raises DamageAtError: if a part of it is missing or damaged.
        :raises FileNotFoundError: if the segment was removed.
        """
        if self._walk is not None and self._walk.offset >= until:
            return
        try:
            file = SegmentFile.open(self.path, seed, log_id)
        except DamageError as error:
            raise DamageAtError(str(error), 0) from None
        walk = self._walk or file.start()
        try:
            if self._walk is None:
                self._read_preamble(file, walk)
                if self._take_footer(file, walk, until):
                    return
            for block in walk_blocks(file, walk, until):
                self._builder.add(*block)
            self.refs = self._builder.refs()
        except DamageError as error:
            raise DamageAtError(str(error), walk.file_at) from None
        finally:
            file.close()
        self._walk = walk

    def _read_preamble(self, file: SegmentFile, walk: Walk) -> None:
        block = next(walk_blocks(file, walk, None))
        self.preamble = dict(schema_frames(file.payload(block)))

    def _take_footer(self, file: SegmentFile, walk: Walk, until: int) -> bool:
        try:
            refs, end, _ = read_footer(file)
        except DamageError:
            return False
        if end != until:
            return False
        self.refs = refs
        walk.offset = end
        self._walk = walk
        return True


def read_run(fd: int, ref: BlockRef, seed: int) -> Bytes:
    """Return the raw frames of a run, read-only.

    :raises DamageAtError: if any byte of it was changed.
    """
    payloads: list[Bytes] = []
    for block, stored in _each_block(fd, ref, seed):
        try:
            payloads.append(payload_of(stored, block.header, seed))
        except DamageError as error:
            raise DamageAtError(str(error), block.file_at) from None
    if len(payloads) == 1:
        return payloads[0]
    joined = np.concatenate(payloads)
    joined.flags.writeable = False
    return joined


def run_blocks(fd: int, ref: BlockRef, seed: int) -> list[Block]:
    """Return the blocks of a run, without checking their frames.

    :raises DamageAtError: if one of their headers is damaged.
    """
    return [block for block, _ in _each_block(fd, ref, seed)]


def _each_block(fd: int, ref: BlockRef, seed: int) -> Iterator[tuple[Block, memoryview]]:
    # The blocks of a run, each with the stored bytes of its frames.
    data = memoryview(read_fully(fd, ref.size_on_disk, ref.file_at))
    at, offset, chain = 0, ref.header.log_offset, None
    try:
        for _ in range(ref.blocks):
            header = codec.decode_block_header(data, at, seed)
            if header.log_offset != offset or chain not in {None, header.chain}:
                raise DamageError("a block does not continue the block before it")
            stored = data[at + header.header_size : at + header.size_on_disk]
            yield Block(ref.file_at + at, header), stored
            at += header.size_on_disk
            offset, chain = header.end, header.crc
        if chain != ref.header.crc:
            raise DamageError("the blocks are not those that were indexed")
    except DamageError as error:
        raise DamageAtError(str(error), ref.file_at + at) from None


def find_block(file: SegmentFile, start: int) -> int | None:
    """Return the byte, `start` or later, at which the next sound block header or footer starts.

    This distinguishes damage in the middle from a torn end, which nothing follows.
    """
    at, size = start, file.size()
    while at < size:
        window = read_fully(file.fd, _SEARCH_READ + codec.BLOCK_HEADER_SIZE_MAX, at)
        found = window.find(codec.BLOCK_MAGIC)
        while 0 <= found < _SEARCH_READ:
            if _is_block(file, window, found):
                return at + found
            found = window.find(codec.BLOCK_MAGIC, found + 1)
        at += _SEARCH_READ
    try:
        footer_at = read_footer(file)[2]
    except DamageError:
        return None
    return footer_at if footer_at >= start else None


def _is_block(file: SegmentFile, window: bytes, at: int) -> bool:
    try:
        header = codec.decode_block_header(window, at, file.seed)
    except DamageError:
        return False
    return header.epoch == file.header.epoch
