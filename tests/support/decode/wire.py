"""Frames written by hand, for cases that no recorded stream has; and the recorded ones."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.decode.changes import TableChanges, decode_block
from tailrace.decode.json.debezium import SourceInfo
from tailrace.protocol import frames
from tailrace.protocol.frames import Bytes

UNCHANGED = object()
Cell = str | bytes | None | object

SOURCE = SourceInfo("shop", "db", "1.0")
ORDERS = 16385
ORDERS_COLUMNS = [("id", 23, -1), ("note", 25, -1), ("price", 1700, ((12 << 16) | 2) + 4)]


def xlog(payload: bytes, lsn: int = 100) -> bytes:
    return frames.xlog_frame(lsn, lsn, 0, payload)


def relation(
    oid: int = ORDERS,
    table: str = "orders",
    columns: Iterable[tuple[str, int, int]] = ORDERS_COLUMNS,
    key: Iterable[str] = ("id",),
    identity: str = "d",
) -> bytes:
    listed, keys = list(columns), set(key)
    payload = b"R" + struct.pack("!I", oid) + b"public\0" + table.encode() + b"\0" + identity.encode()
    payload += struct.pack("!H", len(listed))
    for name, kind, modifier in listed:
        payload += bytes([name in keys]) + name.encode() + b"\0" + struct.pack("!Ii", kind, modifier)
    return xlog(payload)


def cells(values: Iterable[Cell]) -> bytes:
    listed = list(values)
    parts = [struct.pack("!H", len(listed))]
    for value in listed:
        if value is None:
            parts.append(b"n")
        elif value is UNCHANGED:
            parts.append(b"u")
        else:
            text = value if isinstance(value, bytes) else str(value).encode()
            parts.append(b"t" + struct.pack("!I", len(text)) + text)
    return b"".join(parts)


def insert(*new: Cell, oid: int = ORDERS) -> bytes:
    return xlog(b"I" + struct.pack("!I", oid) + b"N" + cells(new))


def update(*new: Cell, oid: int = ORDERS, key: Iterable[Cell] = (), old: Iterable[Cell] = ()) -> bytes:
    before = b"K" + cells(key) if key else b"O" + cells(old) if old else b""
    return xlog(b"U" + struct.pack("!I", oid) + before + b"N" + cells(new))


def delete(*values: Cell, oid: int = ORDERS, mark: bytes = b"K") -> bytes:
    return xlog(b"D" + struct.pack("!I", oid) + mark + cells(values))


def truncate(*oids: int) -> bytes:
    return xlog(b"T" + struct.pack("!iB", len(oids), 0) + struct.pack(f"!{len(oids)}I", *oids))


def message(prefix: str, content: bytes, *, transactional: bool = True, lsn: int = 100) -> bytes:
    head = b"M" + struct.pack("!BQ", transactional, lsn) + prefix.encode() + b"\0"
    return xlog(head + struct.pack("!I", len(content)) + content)


def begin(lsn: int = 1000, time_us: int = 0, xid: int = 7) -> bytes:
    return xlog(b"B" + struct.pack("!QqI", lsn, time_us, xid))


def commit(lsn: int = 1000) -> bytes:
    return xlog(b"C" + struct.pack("!BQQq", 0, lsn, lsn + 10, 0))


def transaction(*changes: bytes, lsn: int = 1000, xid: int = 7) -> bytes:
    return begin(lsn, xid=xid) + b"".join(changes) + commit(lsn)


def snapshot(*parts: bytes, lsn: int = 1000) -> bytes:
    ends = [frames.control_frame(kind, lsn, 5_000_000, {}) for kind in (b"B", b"E")]
    return ends[0] + b"".join(parts) + ends[1]


def block(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


def decode(data: bytes, schema: Iterable[bytes] = (), **options: Any) -> list[TableChanges]:
    return decode_block(block(data), 0, None, schema, **options)


def only(data: bytes, schema: Iterable[bytes] = ()) -> TableChanges:
    """Decode frames whose changes all belong to one table version."""
    [changes] = decode(data, schema)
    return changes


def column(kind: int, values: Iterable[Cell], modifier: int = -1) -> TableChanges:
    """Return inserts into a table with one column `v` of type `kind`."""
    shape = relation(columns=[("v", kind, modifier)], key=())
    return only(transaction(shape, *(insert(value) for value in values)))


def typed(kind: int, values: Iterable[Cell], modifier: int = -1) -> tuple[Any, list[Any]]:
    """Return column `v` as an Arrow array, and `_special` of each row."""
    rows = column(kind, values, modifier).rows()
    rows.validate(full=True)
    specials = [dict(entry)["v"] if entry else None for entry in rows.column("_special").to_pylist()]
    return rows.column("v"), specials


def json_of(changes: TableChanges) -> list[dict[str, Any]]:
    return [json.loads(line) for line in changes.json_lines("0", SOURCE).to_pylist()]


def vector(name: str) -> dict[str, Any]:
    """Return the file that `record_vectors.py` wrote under `name`."""
    path = Path(__file__).parents[2] / "decode" / "vectors" / f"{name}.json"
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded
