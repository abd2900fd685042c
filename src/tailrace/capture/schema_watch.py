"""Facts for the Relation messages that the stream brings: looked up, and put before them.

The server sends a Relation message before a table's first change in a connection, and whenever
the table may have changed since. Only then is the catalogue asked, over a session of its own, and
only what a message can't say is taken from it. Rows alone never wait: a chunk without a Relation
message is not looked at.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import structlog

from tailrace.capture.session import Session
from tailrace.capture.table_facts import CatalogTable, catalog_tables, facts_of, versioned
from tailrace.capture.unsent import require_left_out, unsent
from tailrace.config.disclosure import Columns, Disclosure
from tailrace.config.postgres import PostgresSource
from tailrace.errors import TailraceError
from tailrace.model import Relation, format_lsn
from tailrace.protocol import frames
from tailrace.protocol.facts import Facts, differences
from tailrace.protocol.frames import Bytes
from tailrace.protocol.pgoutput import parse_relation

log = structlog.get_logger(__name__)

#: How long the stream may wait for a transaction that it has sent to become visible.
_VISIBLE_DEADLINE_S = 1.0
_LOOK_AGAIN_S = 0.002


@dataclass(slots=True)
class _Message:
    """A Relation message in a chunk, at byte `at`, in a transaction."""

    at: int
    xid: int
    commit_lsn: int
    body: bytes
    relation: Relation


class SchemaWatch:
    """Puts facts frames before Relation messages whose tables are not as the log knows them.

    Belongs to the receiving thread.

    :param connect: opens a session for SQL; called when the first table is looked up, and again
        after the session broke.
    :param in_force: the schema frames in force at the log's end, by key.
    :param source: whose publication sends the messages, and whose columns may be left out.
    """

    def __init__(
        self,
        connect: Callable[[], Session],
        in_force: Callable[[], Mapping[str, bytes]],
        source: PostgresSource,
    ) -> None:
        self._connect = connect
        self._in_force = in_force
        self._source = source
        self._session: Session | None = None

    def annotate(self, chunk: Bytes, state: frames.Numbers) -> Bytes:
        """Return the chunk with the facts that are new before the messages that they belong to.

        :param state: the scan state before the chunk.
        :raises TailraceError: as `Session.run`; `COLUMN_NOT_SENT`: nothing of the chunk is in the log then.
        """
        messages = _messages(chunk, state)
        if not messages:
            return chunk
        in_force = self._in_force()
        known = known_facts(in_force)
        bodies = {
            message.relation.oid: in_force[f"R{message.relation.oid}"][frames.XLOG_PAYLOAD_AT :]
            for message in messages
            if f"R{message.relation.oid}" in in_force
        }
        tables = self._look_up_after(messages)
        parts: list[Bytes] = []
        done = 0
        for message in messages:
            oid = message.relation.oid
            before = known.get(oid)
            reshaped = bodies.get(oid) != message.body and (oid in bodies or before is None)
            facts = self._facts(message, tables.get(oid), known, reshaped=reshaped)
            self._require_whole(message, facts, tables.get(oid), before)
            bodies[oid] = message.body
            if facts == before:
                continue
            known[oid] = facts
            frame = frames.control_frame(frames.FACTS, message.commit_lsn, 0, facts.as_json())
            parts += [chunk[done : message.at], np.frombuffer(frame, np.uint8)]
            done = message.at
            _tell(before or known.get(facts.replaced), facts, message, self._source)
        return np.concatenate([*parts, chunk[done:]]) if parts else chunk

    def close(self) -> None:
        """Close the session, if there is one."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _facts(
        self, message: _Message, table: CatalogTable | None, known: Mapping[int, Facts], *, reshaped: bool
    ) -> Facts:
        relation = message.relation
        facts = facts_of(
            relation.columns,
            (relation.schema, relation.table),
            table,
            known.get(relation.oid),
            relation=relation.oid,
            xid=message.xid,
        )
        facts = versioned(facts, known, reshaped=reshaped)
        before = known.get(relation.oid)
        if facts.replaced and (before is None or before.qualified_name != facts.qualified_name):
            other = self._look_up([facts.replaced]).get(facts.replaced)
            if other is not None:
                facts = replace(facts, replaced_name=(other.schema, other.table))
        return facts

    def _require_whole(
        self, message: _Message, facts: Facts, table: CatalogTable | None, before: Facts | None
    ) -> None:
        missing = unsent(message.relation.columns, facts, table, before, xid=message.xid)
        # A catalogue that does not know yet what the transaction did says nothing of it.
        if before is None or table is None or not missing or not table.sees(message.xid):
            return
        assert self._session is not None  # it has just looked the table up
        left_out = _left_out(before, self._source)
        seen = [column for column in missing if column.name not in left_out]
        require_left_out(
            self._session,
            self._source.publication,
            table,
            seen,
            xid=message.xid,
            position=message.commit_lsn,
        )

    def _look_up_after(self, messages: Sequence[_Message]) -> dict[int, CatalogTable]:
        """Look the messages' tables up, once the transactions that sent them are visible.

        The wait has a limit: a commit that waits for a synchronous standby may be waiting for us.
        """
        oids = sorted({message.relation.oid for message in messages})
        deadline = time.monotonic() + _VISIBLE_DEADLINE_S
        while True:
            tables = self._look_up(oids)
            found = ((tables.get(message.relation.oid), message.xid) for message in messages)
            if all(table is None or table.sees(xid) for table, xid in found):
                return tables
            if time.monotonic() > deadline:
                return tables
            time.sleep(_LOOK_AGAIN_S)

    def _look_up(self, oids: list[int]) -> dict[int, CatalogTable]:
        kept = self._session is not None
        if self._session is None:
            self._session = self._connect()
        try:
            return catalog_tables(self._session, oids)
        except TailraceError:
            self.close()
            if not kept:
                raise
        # The session had been idle, and may have been ended for that.
        return self._look_up(oids)


def known_facts(in_force: Mapping[str, bytes]) -> dict[int, Facts]:
    """Return the facts among schema frames in force, by relation.

    :raises TailraceError: `PROTOCOL_VIOLATION` if a frame makes no sense.
    """
    found = (
        Facts.from_json(frames.control_json(frame)) for key, frame in in_force.items() if key.startswith("F")
    )
    return {facts.relation: facts for facts in found}


def _messages(chunk: Bytes, state: frames.Numbers) -> list[_Message]:
    found = []
    # Messages outside of a transaction are a snapshot's, which brings its own facts.
    inside = state[frames.OPEN] == frames.TRANSACTION_OPEN
    xid, commit_lsn = int(state[frames.XID]), int(state[frames.COMMIT_LSN])
    for at, frame in frames.each_frame(chunk):
        if frame[frames.KIND_AT] != 0x77 or len(frame) <= frames.XLOG_PAYLOAD_AT:
            continue
        kind = frame[frames.XLOG_PAYLOAD_AT]
        if kind == 0x42 and len(frame) >= frames.XLOG_PAYLOAD_AT + 21:  # 'B'
            commit_lsn, _, xid = struct.unpack_from("!QqI", frame, frames.XLOG_PAYLOAD_AT + 1)
            inside = True
        elif kind == 0x43:  # 'C'
            inside = False
        elif kind == 0x52 and inside:  # 'R'
            body = bytes(frame[frames.XLOG_PAYLOAD_AT :])
            found.append(_Message(at, xid, commit_lsn, body, parse_relation(body)))
    return found


def _tell(before: Facts | None, facts: Facts, message: _Message, rules: Disclosure) -> None:
    """Say what changed, of what is let out of the log."""
    if before is None or before.version in (0, facts.version):
        return
    changes = differences(before, facts) or ["replica identity or key changed"]
    if rules.leaves_columns_out and differences(before, facts):
        changes = differences(_let_out(before, rules), _let_out(facts, rules))
        if not changes:
            return
    log.info(
        "schema changed",
        table=facts.qualified_name,
        version=facts.version,
        changes=changes,
        position=format_lsn(message.commit_lsn),
    )


def _let_out(facts: Facts, rules: Disclosure) -> Facts:
    left_out = _left_out(facts, rules)
    return replace(facts, columns=tuple(column for column in facts.columns if column.name not in left_out))


def _left_out(facts: Facts, rules: Disclosure) -> frozenset[str]:
    key = frozenset(facts.primary_key)
    columns = Columns(tuple(column.name for column in facts.columns), key, full=False, primary_key=key)
    return rules.left_out(facts.schema, facts.table, columns)
