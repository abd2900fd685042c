"""A change log written by hand: frames of tables that exist on no server."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Self

import numpy as np

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.writer import LogOptions, LogWriter
from tailrace.model import SourceFingerprint
from tailrace.protocol import frames

INT4, INT8, TEXT, NUMERIC, BOOL, TIMESTAMPTZ, TIMESTAMP, FLOAT8, VARCHAR, DATE = (
    23, 20, 25, 1700, 16, 1184, 1114, 701, 1043, 1082,
)  # fmt: skip
UNCHANGED = object()

Cell = str | None | object


def numeric(precision: int, scale: int) -> tuple[int, int]:
    return NUMERIC, ((precision << 16) | scale) + 4


def source(slot: str = "tailrace_test") -> SourceFingerprint:
    return SourceFingerprint("postgresql", "7300000000000000001", "shop", slot)


def xlog(payload: bytes) -> bytes:
    return frames.xlog_frame(0, 0, 0, payload)


def relation(
    oid: int, name: str, columns: dict[str, int | tuple[int, int]], key: tuple[str, ...] = ("id",)
) -> bytes:
    schema, _, table = name.partition(".")
    payload = b"R" + struct.pack("!I", oid) + schema.encode() + b"\0" + table.encode() + b"\0d"
    payload += struct.pack("!H", len(columns))
    for column, kind in columns.items():
        oid_, modifier = kind if isinstance(kind, tuple) else (kind, -1)
        payload += bytes([column in key]) + column.encode() + b"\0" + struct.pack("!Ii", oid_, modifier)
    return xlog(payload)


def row(cells: tuple[Cell, ...]) -> bytes:
    parts = [struct.pack("!H", len(cells))]
    for cell in cells:
        if cell is None:
            parts.append(b"n")
        elif cell is UNCHANGED:
            parts.append(b"u")
        else:
            text = str(cell).encode()
            parts.append(b"t" + struct.pack("!i", len(text)) + text)
    return b"".join(parts)


def insert(oid: int, *cells: Cell) -> bytes:
    return xlog(b"I" + struct.pack("!I", oid) + b"N" + row(cells))


def update(oid: int, *cells: Cell, key: tuple[Cell, ...] = ()) -> bytes:
    before = b"K" + row(key) if key else b""
    return xlog(b"U" + struct.pack("!I", oid) + before + b"N" + row(cells))


def delete(oid: int, *cells: Cell) -> bytes:
    return xlog(b"D" + struct.pack("!I", oid) + b"K" + row(cells))


def truncate(*oids: int) -> bytes:
    return xlog(b"T" + struct.pack("!iB", len(oids), 0) + b"".join(struct.pack("!I", oid) for oid in oids))


def message(lsn: int, prefix: str, content: bytes) -> bytes:
    head = b"M" + struct.pack("!BQ", 0, lsn) + prefix.encode() + b"\0"
    return xlog(head + struct.pack("!i", len(content)) + content)


class HandmadeLog:
    """Writes transactions one after another; each `commit` is durable when it returns.

    LSNs rise by hundreds, commit times by seconds from `EPOCH_US`.
    """

    EPOCH_US = 1_767_225_600_000_000  # 2026-01-01

    def __init__(self, path: Path, slot: str = "tailrace_test", options: LogOptions | None = None) -> None:
        self.path = path
        self.directory = LogDirectory.create_or_open(path, source(slot))
        self.writer = LogWriter.open(self.directory, "0", options=options or LogOptions())
        self._count = 0

    def commit(self, *changes: bytes) -> int:
        """Write one transaction and return the log offset after it."""
        self.append(self.transaction(*changes))
        return self.writer.sync().offset

    def transaction(self, *changes: bytes) -> bytes:
        self._count += 1
        lsn, time_us = 1000 + 100 * self._count, self.EPOCH_US + 1_000_000 * self._count
        wire_time = time_us - 946_684_800_000_000
        begin = xlog(b"B" + struct.pack("!QqI", lsn, wire_time, 700 + self._count))
        end = xlog(b"C" + struct.pack("!BQQq", 0, lsn, lsn + 50, wire_time))
        return begin + b"".join(changes) + end

    def append(self, data: bytes) -> None:
        chunk = np.frombuffer(data, np.uint8)
        self.writer.append(chunk, frames.summarise(chunk, self.writer.scan_state()))

    def close(self) -> None:
        self.writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
