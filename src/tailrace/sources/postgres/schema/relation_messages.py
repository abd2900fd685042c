"""Queries the catalogue for what Relation messages lack, and inserts it before them as facts frames.

The server sends a Relation message before a table's first change in a connection, and whenever
the table may have changed since. Only then is the catalogue queried, over a separate session, and
only for what the message lacks. Rows alone never wait: a chunk without a Relation message is not
examined.

A column may be in the log and, by its number, still in the catalogue, but not in a Relation message. Then
the publication's column list leaves it out, or the server does not know it: a column that was added by a
transaction which committed while the slot was created is in the exported snapshot, but not in the slot's
view of the catalogue. Its values are then missing from the stream, and it must not be treated as dropped.
A start is repeated when that happens (`slot.creation.create_own_slot`); the check here is for slots that
were created otherwise.
"""

from __future__ import annotations

import json
import struct
import time
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import structlog

from tailrace.config.source.column_policy import ColumnPolicy, ColumnRoles
from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import Kind, TailraceError
from tailrace.model import Relation, format_lsn
from tailrace.protocol import frames, metadata_frames
from tailrace.protocol import pgoutput as pg
from tailrace.protocol.facts import ColumnFacts, Facts, differences
from tailrace.protocol.frames import Bytes
from tailrace.protocol.pgoutput import parse_relation
from tailrace.sources.postgres.connection.quoting import quote_literal
from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.connection.text_encoding import names_in_utf8
from tailrace.sources.postgres.schema.published_tables import COLUMN_LISTS_VERSION_MIN
from tailrace.sources.postgres.schema.source_tables import Name
from tailrace.sources.postgres.schema.table_facts import (
    CatalogTable,
    CatalogTables,
    KnownFacts,
    facts_of,
    missing_columns,
    versioned,
)
from tailrace.sources.postgres.schema.table_metadata import catalog_tables

log = structlog.get_logger(__name__)


# How the publication sends the table now. A list may belong to a partitioned ancestor, whose column numbers
# differ.
_LISTS = """
WITH tables(oid) AS (SELECT {oid}::oid UNION SELECT relid::oid FROM pg_partition_ancestors({oid})),
     publication AS (SELECT oid, puballtables, xmin AS xid FROM pg_publication WHERE pubname = {publication})
SELECT array_to_json(r.prattrs::int2[])::text AS numbers, r.prrelid = {oid} AS own,
       r.xmin::text::bigint AS xid
  FROM pg_publication_rel r JOIN publication p ON p.oid = r.prpubid JOIN tables t ON t.oid = r.prrelid
UNION ALL
SELECT NULL, true, s.xmin::text::bigint
  FROM pg_publication_namespace s JOIN publication p ON p.oid = s.pnpubid
  JOIN pg_class c ON c.relnamespace = s.pnnspid JOIN tables t ON t.oid = c.oid
UNION ALL
SELECT NULL, true, xid::text::bigint FROM publication WHERE puballtables
"""


def require_left_out(
    session: Session,
    publication: str,
    table: CatalogTable,
    columns: Sequence[ColumnFacts],
    *,
    xid: int,
    position: int,
) -> None:
    """Check that the publication's column list leaves `columns` out, or may have done so at `xid`.

    :raises TailraceError: `COLUMN_NOT_SENT`; as `Session.run`.
    """
    missing = [column.name for column in columns]
    if missing and session.server_version >= COLUMN_LISTS_VERSION_MIN:
        command = _LISTS.format(oid=table.oid, publication=quote_literal(publication))
        rows = session.run(command, "look at the publication's column list")
        if not rows:
            return  # the table was removed since, perhaps with a list
        for row in rows:
            listed = json.loads(row["numbers"] or "null")
            if table.later(row.number("xid"), xid) or (listed is not None and not row.flag("own")):
                return
            if listed is not None:
                missing = [column.name for column in columns if column.number in listed]
    if not missing:
        return
    names = ", ".join(map(repr, missing))
    raise TailraceError(
        Kind.COLUMN_NOT_SENT,
        f"follow the table {table.schema}.{table.table}: the server sends its rows without {names}, which "
        "was not dropped and which no column list of the publication leaves out",
        "PostgreSQL may not decode a column that was added while the slot was created, so its values are "
        "not in the stream: begin a new log with a new snapshot",
        {"table": f"{table.schema}.{table.table}", "position": format_lsn(position)},
    )


#: Longest wait, in seconds, until a transaction that was received becomes visible in the catalogue.
_VISIBLE_DEADLINE_S = 1.0
_LOOK_AGAIN_S = 0.002
#: Interval, in seconds, of the queries for facts that are still pending after that.
_ASK_AGAIN_S = 1.0


@dataclass(slots=True)
class _Message:
    """A Relation message in a chunk, at byte `at`, in a transaction."""

    at: int
    xid: int
    commit_lsn: int
    body: bytes
    relation: Relation


class SchemaWatch:
    """Inserts facts frames before Relation messages whose tables differ from the log's facts.

    Used only by the receiving thread.

    :param connect: opens a session for SQL; called when the first table is looked up, and again
        after the session was lost.
    :param in_force: returns the schema frames in force at the log's end, by key.
    :param facts: returns the facts among them.
    :param source: names the publication and the columns that are left out.
    """

    def __init__(
        self,
        connect: Callable[[], Session],
        in_force: Callable[[], Mapping[str, bytes]],
        facts: Callable[[], KnownFacts],
        source: PostgresSource,
    ) -> None:
        self._connect = connect
        self._facts_in_force = facts
        self._in_force = in_force
        self._source = source
        self._session: Session | None = None
        self._pending: list[tuple[Facts, _Message]] | None = None
        self._ask_again_s = 0.0

    def annotate(self, chunk: Bytes, state: frames.Numbers) -> Bytes:
        """Return the chunk with names as UTF-8, and new facts inserted before their Relation messages.

        :param state: the scan state before the chunk.
        :raises TailraceError: as `Session.run`; `COLUMN_NOT_SENT`, before any of the chunk is in the log.
        """
        chunk = names_in_utf8(chunk)
        messages = _messages(chunk, state)
        if not messages:
            return chunk
        # Facts that were pending and are known now are at the chunk's beginning.
        ahead = dict(metadata_frames.schema_frames(chunk[: messages[0].at]))
        in_force = ChainMap(ahead, dict(self._in_force()))
        known = KnownFacts(ahead, base=self._facts_in_force())
        bodies = {
            message.relation.oid: in_force[f"R{message.relation.oid}"][frames.XLOG_PAYLOAD_AT :]
            for message in messages
            if f"R{message.relation.oid}" in in_force
        }
        tables = self._look_up_after(messages)
        # Pending facts of these tables that are known now come first, because later versions depend on them.
        # A transaction that alters a table keeps it locked until the change is visible to all, so later
        # writes are to the table as the catalogue has it.
        written = {message.relation.oid for message in messages if tables.sees(message.xid)}
        early = self._settled(tables, {message.relation.oid for message in messages}, written)
        if early is not None:
            for key, frame in metadata_frames.schema_frames(early):
                known.take(key, frame)
        parts: list[Bytes] = [] if early is None else [early]
        done = 0
        for message in messages:
            oid = message.relation.oid
            before = known.get(oid)
            reshaped = bodies.get(oid) != message.body and (oid in bodies or before is None)
            if tables.sees(message.xid):
                facts = self._facts(message, tables.get(oid), known, reshaped=reshaped)
                self._require_whole(message, facts, tables.get(oid), before)
            else:  # the catalogue does not show the transaction's changes yet
                facts = self._pending_facts(message, known, reshaped=reshaped)
            bodies[oid] = message.body
            if facts == before:
                continue
            known.put(facts)
            frame = frames.control_frame(frames.FACTS, message.commit_lsn, 0, facts.as_json())
            parts += [chunk[done : message.at], np.frombuffer(frame, np.uint8)]
            done = message.at
            _log_change(before or known.get(facts.replaced), facts, message, self._source)
        return np.concatenate([*parts, chunk[done:]]) if parts else chunk

    def settle(self) -> Bytes | None:
        """Query pending facts again; return the frames of those that are known now, to be appended next,
        or None.

        :raises TailraceError: as `Session.run`.
        """
        pending = self._known_pending()
        if not pending or time.monotonic() < self._ask_again_s:
            return None
        self._ask_again_s = time.monotonic() + _ASK_AGAIN_S
        oids = {facts.relation for facts, _ in pending}
        return self._settled(self._look_up(sorted(oids)), oids)

    def forget(self) -> None:
        """Read pending facts from the log again: frames that `settle` returned may have been discarded."""
        self._pending, self._ask_again_s = None, 0.0

    def _known_pending(self) -> list[tuple[Facts, _Message]]:
        if self._pending is None:
            self._pending = _pending_in(self._in_force())
        return self._pending

    def _settled(
        self, tables: CatalogTables, oids: Collection[int], written: Collection[int] = ()
    ) -> Bytes | None:
        """Return the frames of facts that were pending and are known now; None if there are none.

        :param tables: the present catalogue; of `oids`, all that still exist.
        :param written: those of `oids` to which a later transaction, visible now, has written.
        """
        found: list[bytes] = []
        waiting: list[tuple[Facts, _Message]] = []
        for facts, message in self._known_pending():
            is_known = tables.sees(message.xid) or facts.relation in written
            if facts.relation not in oids or not is_known:
                waiting.append((facts, message))
                continue
            table = tables.get(facts.relation)
            name, columns = (facts.schema, facts.table), message.relation.columns
            # Missing columns are not checked here: a column can get lost only while a slot is created, and
            # such a start is repeated (`slot.creation.create_own_slot`).
            now = facts_of(columns, name, table, facts, relation=facts.relation, xid=message.xid)
            held = self._in_force()[f"F{facts.relation}"]
            newest = Facts.from_json(frames.control_json(held))
            now = replace(
                now, version=facts.version, replaced=facts.replaced, replaced_name=facts.replaced_name,
                read_from=max(facts.read_from, newest.read_from),
            )  # fmt: skip
            if now.replaced and now.replaced_name is None:
                now = replace(now, replaced_name=self._name_of(now.replaced))
            found.append(frames.control_frame(frames.FACTS, message.commit_lsn, 0, now.as_json()))
            if newest.version != facts.version:
                found.append(held)  # so that a later version stays in force
        self._pending = waiting
        return np.frombuffer(b"".join(found), np.uint8) if found else None

    def close(self) -> None:
        """Close the session, if there is one."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _facts(
        self, message: _Message, table: CatalogTable | None, known: KnownFacts, *, reshaped: bool
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
        facts = versioned(facts, known, reshaped=reshaped, name_of=self._name_of)
        if any(column.unknown and not column.number for column in facts.columns):
            log.warning(
                "it is unknown which column of a table was sent: the table was altered several times before "
                "this change was read; mirrors of the table stop, or follow as set with on_type_change",
                table=facts.qualified_name,
                position=format_lsn(message.commit_lsn),
            )
        return facts

    def _pending_facts(self, message: _Message, known: KnownFacts, *, reshaped: bool) -> Facts:
        """Return facts without the catalogue, which does not show the table's present version yet."""
        relation = message.relation
        name, before = (relation.schema, relation.table), known.get(relation.oid)
        if before is not None and before.pending and not reshaped:
            return before  # the altering transaction keeps the table locked until its change is visible
        facts = facts_of(relation.columns, name, None, before, relation=relation.oid, xid=message.xid)
        facts = replace(versioned(facts, known, reshaped=True), pending=message.xid)
        self._known_pending().append((facts, message))
        log.warning(
            "a table was altered by a transaction that is not visible to other sessions yet; readers wait",
            table=facts.qualified_name,
            position=format_lsn(message.commit_lsn),
        )
        return facts

    def _require_whole(
        self, message: _Message, facts: Facts, table: CatalogTable | None, before: Facts | None
    ) -> None:
        missing = missing_columns(message.relation.columns, facts, table, before, xid=message.xid)
        if before is None or table is None or not missing:
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

    def _look_up_after(self, messages: Sequence[_Message]) -> CatalogTables:
        """Look up the messages' tables when the transactions that sent them are visible.

        The wait is limited: a commit that waits for a synchronous standby may be waiting for this capture.
        """
        oids = sorted({message.relation.oid for message in messages})
        deadline = time.monotonic() + _VISIBLE_DEADLINE_S
        while True:
            tables = self._look_up(oids)
            if all(tables.sees(message.xid) for message in messages) or time.monotonic() > deadline:
                return tables
            time.sleep(_LOOK_AGAIN_S)

    def _name_of(self, oid: int) -> Name | None:
        table = self._look_up([oid]).get(oid)
        return None if table is None else (table.schema, table.table)

    def _look_up(self, oids: list[int]) -> CatalogTables:
        kept = self._session is not None
        if self._session is None:
            self._session = self._connect()
        try:
            return catalog_tables(self._session, oids)
        except TailraceError:
            self.close()
            if not kept:
                raise
        # The session was idle, and may have been ended because of that.
        return self._look_up(oids)


def _pending_in(in_force: Mapping[str, bytes]) -> list[tuple[Facts, _Message]]:
    """Return the facts in force that are still pending from an earlier process, with their messages."""
    found = []
    for key, held in in_force.items():
        if not key.startswith("F"):
            continue
        facts = Facts.from_json(frames.control_json(held))
        frame = in_force.get(f"R{facts.relation}")
        if facts.pending and frame is not None:
            body = frame[frames.XLOG_PAYLOAD_AT :]
            lsn = int.from_bytes(held[frames.CONTROL_LSN_AT : frames.CONTROL_TIME_AT], "big")
            found.append((facts, _Message(0, facts.pending, lsn, body, parse_relation(body))))
    return found


def _messages(chunk: Bytes, state: frames.Numbers) -> list[_Message]:
    found = []
    # Messages outside a transaction belong to a snapshot, which has its own facts.
    inside = state[frames.OPEN] == frames.TRANSACTION_OPEN
    xid, commit_lsn = int(state[frames.XID]), int(state[frames.COMMIT_LSN])
    for at, frame in frames.each_frame(chunk):
        if frame[frames.KIND_AT] != frames.XLOG or len(frame) <= frames.XLOG_PAYLOAD_AT:
            continue
        message = frame[frames.XLOG_PAYLOAD_AT :]
        if message[0] == pg.BEGIN and len(message) >= pg.BEGIN_SIZE:
            commit_lsn, _, xid = struct.unpack_from("!QqI", message, pg.BEGIN_LSN_AT)
            inside = True
        elif message[0] == pg.COMMIT:
            inside = False
        elif message[0] == pg.RELATION and inside:
            body = bytes(message)
            found.append(_Message(at, xid, commit_lsn, body, parse_relation(body)))
    return found


def _log_change(before: Facts | None, facts: Facts, message: _Message, rules: ColumnPolicy) -> None:
    """Log the schema change, without columns that the settings leave out."""
    if before is None or before.version in (0, facts.version):
        return
    changes = ["replica identity or key changed"]
    if differences(before, facts):
        changes = differences(_let_out(before, rules), _let_out(facts, rules))
    if changes:
        log.info(
            "schema changed",
            table=facts.qualified_name,
            version=facts.version,
            changes=changes,
            position=format_lsn(message.commit_lsn),
        )


def _let_out(facts: Facts, rules: ColumnPolicy) -> Facts:
    left_out = _left_out(facts, rules)
    return replace(facts, columns=tuple(column for column in facts.columns if column.name not in left_out))


def _left_out(facts: Facts, rules: ColumnPolicy) -> frozenset[str]:
    key = frozenset(facts.primary_key)
    columns = ColumnRoles(tuple(column.name for column in facts.columns), key, full=False, primary_key=key)
    return rules.left_out(facts.schema, facts.table, columns)
