"""Blocks that are damaged on purpose."""

from __future__ import annotations

from tailrace.errors import Kind, TailraceError
from tailrace.protocol import frames
from tests.support.decode.wire import (
    UNCHANGED,
    delete,
    insert,
    message,
    relation,
    snapshot,
    transaction,
    truncate,
    update,
)  # fmt: skip

REFUSED = {Kind.DECODE_FAILED, Kind.PROTOCOL_VIOLATION, Kind.SCHEMA_MISSING}


SHAPE = relation(
    columns=[("id", 23, -1), ("note", 25, -1), ("at", 1184, -1), ("tags", 1009, -1), ("raw", 17, -1)]
)


def seed() -> bytes:
    row = ("1", "héllo", "2024-01-01 00:00:00.5+00", '{a,"b\\"c",NULL}', "\\x00ff")
    return (
        SHAPE
        + transaction(
            insert(*row),
            update("1", UNCHANGED, None, "{}", "\\x"),
            update("2", *row[1:], key=("1", None, None, None, None)),
            update("2", *row[1:], old=row),
            delete("2", None, None, None, None),
            truncate(16385, 16385),
            message("p", b"content"),
        )
        + snapshot(frames.snapshot_frame(16385, 0, 2, b"1\ta\\tb\t\\N\t{}\t\\\\x00\n" * 2), lsn=2000)
    )


def require_named(error: TailraceError) -> None:
    assert error.kind in REFUSED
