"""Builds chunks of real frames, as capture appends them: transactions of a small table."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.writer import LogWriter
from tailrace.model import POSTGRES_EPOCH_US, SourceFingerprint
from tailrace.protocol import frames
from tailrace.protocol.frames import Bytes

SOURCE = SourceFingerprint("postgresql", "7300000000000000001", "shop", "tailrace_shop")
TABLE = 16400
BEGAN_US = POSTGRES_EPOCH_US + 800_000_000_000_000
SECOND_US = 1_000_000


def chunk_of(*parts: bytes) -> Bytes:
    return np.frombuffer(b"".join(parts), np.uint8)


def relation_frame(oid: int = TABLE, columns: tuple[str, ...] = ("id", "note")) -> bytes:
    payload = struct.pack("!cI", b"R", oid) + b"public\0t\0d" + struct.pack("!H", len(columns))
    for number, column in enumerate(columns):
        payload += struct.pack("!B", number == 0) + column.encode() + b"\0" + struct.pack("!Ii", 25, -1)
    return frames.xlog_frame(0, 0, 0, payload)


@dataclass
class Source:
    """Sends transactions: positions rise by 1000, commits are a second apart."""

    lsn: int = 0x1000
    time_us: int = BEGAN_US
    xid: int = 700
    sent: list[bytes] = field(default_factory=list)

    def begin(self, time_us: int | None = None) -> bytes:
        self.lsn += 1000
        self.xid += 1
        self.time_us = self.time_us + SECOND_US if time_us is None else time_us
        return frames.xlog_frame(
            self.lsn,
            self.lsn,
            0,
            struct.pack("!cQqI", b"B", self.lsn, self.time_us - POSTGRES_EPOCH_US, self.xid),
        )

    def insert(self, table: int = TABLE, note: str = "row") -> bytes:
        text = note.encode()
        payload = struct.pack("!cIcH", b"I", table, b"N", 2)
        payload += struct.pack("!cI", b"t", 1) + b"7" + struct.pack("!cI", b"t", len(text)) + text
        return frames.xlog_frame(self.lsn, self.lsn, 0, payload)

    def commit(self) -> bytes:
        payload = struct.pack("!cBQQq", b"C", 0, self.lsn, self.lsn + 8, self.time_us - POSTGRES_EPOCH_US)
        return frames.xlog_frame(self.lsn, self.lsn, 0, payload)

    def transaction(self, rows: int = 1, note: str = "row", time_us: int | None = None) -> bytes:
        """Return a complete transaction; its position (end LSN) is `self.lsn + 8`."""
        frames_ = [self.begin(time_us), *(self.insert(note=f"{note}{n}") for n in range(rows)), self.commit()]
        return b"".join(frames_)


def new_log(path: object) -> LogDirectory:
    return LogDirectory.create_or_open(str(path), SOURCE)


def append(writer: LogWriter, *parts: bytes) -> None:
    """Append frames in one chunk."""
    chunk = chunk_of(*parts)
    writer.append(chunk, frames.summarise(chunk, writer.scan_state()))
