"""Passes the blocks of one log from capture to the consumers' buffers, as they are appended.

In the other direction, it passes frames from consumers to the log's writer. Some captures open the log again
at each connection: frames that the previous writer has not written are passed to the next one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tailrace.changelog.disclosure import keep_disclosure
from tailrace.changelog.format import BlockHeader, HeldBlock, Tail
from tailrace.changelog.writer import Insertion, LogWriter
from tailrace.config.source.section import SourceSection
from tailrace.errors import TailraceError
from tailrace.protocol.frames import Bytes
from tailrace.realtime.buffer import BlockBuffer


class Handover:
    """The listener of one log's writer (`changelog.writer.LogListener`).

    :param buffers: of the consumers; a block is copied once for all of them, as capture reuses its receive
        buffer.
    :param on_durable: called when new blocks have become durable, on the thread that called `sync`.
    :param source: its column policy is stored with the log, unless its capture does so.
    """

    def __init__(
        self,
        buffers: Sequence[BlockBuffer],
        on_durable: Callable[[], None],
        source: SourceSection | None = None,
    ) -> None:
        self._buffers = tuple(buffers)
        self._on_durable = on_durable
        self._policy = None if source is None or source.reads_column_names else source.disclosure
        # Of `_inserted`. Its holder waits for the writer's locks: callbacks within these must not take it.
        self._lock = threading.Lock()
        self._inserted: list[Insertion] = []  # frames that are not known to be durable, in order
        self._writer: LogWriter | None = None
        self._position = -1

    def opened(self, writer: LogWriter) -> None:
        if self._policy is not None:
            keep_disclosure(writer.directory, writer.task, self._policy)
        self._position = writer.durable.position
        self.cut(writer.offset)
        self._say_durable(writer.durable.offset)
        with self._lock:
            self._writer = writer
            self._inserted = [each for each in self._inserted if not 0 <= each.end <= writer.offset]
            for insertion in self._inserted:
                insertion.end = -1
                with contextlib.suppress(TailraceError):  # as in `insert`
                    writer.insert(insertion)

    def appended(self, header: BlockHeader, frames: Bytes, schema: Mapping[str, bytes]) -> None:
        wanting = [buffer for buffer in self._buffers if buffer.fills]
        if not wanting:
            return
        held = frames
        if header.rows or header.has_schema or header.open_at_start is not None:
            held = np.array(frames)
            held.flags.writeable = False
        block = HeldBlock(header, held, schema)
        for buffer in wanting:
            buffer.append(block)

    def cut(self, log_offset: int) -> None:
        for buffer in self._buffers:
            buffer.cut(log_offset)

    def durable(self, tail: Tail) -> None:
        self._say_durable(tail.offset)
        if tail.position > self._position:
            self._position = tail.position
            self._on_durable()

    def closed(self) -> None:
        self._writer = None

    def insert(self, insertion: Insertion) -> bool:
        """Pass a frame to the writer for the next boundary; return whether a writer has accepted it."""
        with self._lock:
            writer = self._writer
            if writer is None:
                return False
            durable = writer.durable.offset
            self._inserted = [each for each in self._inserted if not 0 <= each.end <= durable]
            try:
                writer.insert(insertion)
            except TailraceError:
                return False  # the writer has failed, and reports the error to capture
            self._inserted.append(insertion)
        return True

    def sync(self) -> None:
        """Make the appended blocks durable, if a writer is open."""
        writer = self._writer
        if writer is not None:
            try:
                writer.sync()
            except TailraceError:
                return  # as in `insert`

    @property
    def durable_offset(self) -> int:
        """The log offset before which everything is durable; -1: no writer is open."""
        writer = self._writer
        return -1 if writer is None else writer.durable.offset

    def _say_durable(self, log_offset: int) -> None:
        for buffer in self._buffers:
            buffer.durable(log_offset)
