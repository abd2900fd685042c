"""The table of Debezium's documentation, and its changes as frames and as columns."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tailrace.decode.json.debezium import SourceInfo
from tailrace.model import POSTGRES_EPOCH_US
from tailrace.protocol import frames
from tailrace.protocol.facts import ColumnFacts, Facts
from tailrace.records.group import Group
from tests.support.decode.wire import (
    begin,
    commit,
    decode,
    delete,
    insert,
    message,
    relation,
    truncate,
    update,
)

OID = 16385
FACTS = SourceInfo("PostgreSQL_server", "postgres", "3.6.1.Final")
COLUMNS = [("id", 23, -1), ("first_name", 1043, 259), ("last_name", 1043, 259), ("email", 1043, 259)]
ANNE = ("1", "Anne", "Kretchmar", "annek@noanswer.org")
MARIE = ("1", "Anne Marie", *ANNE[2:])


def shape(identity: str = "d", *, not_null: bool = True) -> list[bytes]:
    """Return the schema frames of `customers`, whose columns are all NOT NULL."""
    key = [name for name, _, _ in COLUMNS] if identity == "f" else ["id"]
    columns = tuple(
        ColumnFacts(name, n + 1, type_oid=kind, type_modifier=modifier, base_oid=kind, not_null=not_null)
        for n, (name, kind, modifier) in enumerate(COLUMNS)
    )
    facts = Facts(OID, "public", "customers", ("id",), columns)
    return [
        frames.control_frame(frames.FACTS, 0, 0, facts.as_json()),
        relation(OID, "customers", COLUMNS, key, identity),
    ]


def groups(data: bytes, schema: Iterable[bytes] = ()) -> list[Group]:
    """Return the changes in frames as groups that are not decoded yet."""
    return [
        Group.of_changes(
            changes.relation.qualified_name if changes.relation else "message",
            np.arange(changes.count), changes, FACTS,
        )
        for changes in decode(data, schema)
    ]  # fmt: skip


def as_columns(group: Group) -> Group:
    """Return a group in the form that transformations return, with no value changed."""
    return Group.of_columns(group.topic, group.index, group.columns, group.relation, group.origin)


def transaction(*changes: bytes) -> bytes:
    """Return the transaction of Debezium's documentation, with its time."""
    at = 1_559_033_904_863_123 - POSTGRES_EPOCH_US
    return begin(24_023_119, at, 555) + b"".join(changes) + commit(24_023_119)


def snapshot(*rows: str) -> bytes:
    """Return rows of a snapshot, as COPY text."""
    at = 1_559_033_904_863_123
    ends = [frames.control_frame(kind, 24_023_119, at, {}) for kind in (b"B", b"E")]
    text = "".join(row + "\n" for row in rows).encode()
    return ends[0] + frames.snapshot_frame(OID, 0, len(rows), text) + ends[1]


def outside(prefix: str, content: bytes) -> bytes:
    """Return a logical message outside of a transaction."""
    return message(prefix, content, transactional=False, lsn=46_523_128)


#: Cases: what happens, and under which replica identity.
CASES = {
    "create": ("d", transaction(insert(*ANNE))),
    "update": ("d", transaction(update(*MARIE))),
    "update_full": ("f", transaction(update(*MARIE, old=ANNE))),
    "delete": ("d", transaction(delete("1", None, None, None))),
    "delete_full": ("f", transaction(delete(*MARIE, mark=b"O"))),
    "key_change": ("d", transaction(update("2", *ANNE[1:], key=("1", None, None, None)))),
    "key_change_full": ("f", transaction(update("2", *ANNE[1:], old=ANNE))),
    "truncate": ("d", transaction(truncate(OID))),
    "read": ("d", snapshot("\t".join(ANNE))),
    "message": ("d", transaction(message("prefix", b"content"))),
    "message_outside": ("d", outside("prefix", b"content")),
    "two_in_one": ("d", transaction(insert(*ANNE), update(*MARIE), delete("1", None, None, None))),
}


def groups_of(case: str) -> list[Group]:
    """Return the groups of a case."""
    identity, data = CASES[case]
    return groups(data, shape(identity))
