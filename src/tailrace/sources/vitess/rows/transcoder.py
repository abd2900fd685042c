"""Transcodes the stream of one shard to frames of the log: the entry to this package.

The frames have complete transactions: responses are kept until the commit arrives, unless the caller requests
a part. A shard's transcoder is used by one thread, the one that appends to the log: shapes of tables are
shared by all shards, in the order of the log.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from tailrace.config.source.column_policy import ColumnRoles
from tailrace.protocol.frames import Bytes, Numbers
from tailrace.sources.row_frames import RowFrames, TableShape
from tailrace.sources.vitess.connection import vstream_pb2 as pb
from tailrace.sources.vitess.rows import events, kernel, layout
from tailrace.sources.vitess.rows.failures import failure, refused
from tailrace.sources.vitess.rows.partial_json import changed_document
from tailrace.sources.vitess.rows.shapes import ShardShapes
from tailrace.sources.vitess.rows.tables import LogTables
from tailrace.sources.vitess.rows.types import ColumnPlan, Refused, passed_over, plan_of, roles_of

#: Given a keyspace, a table and its columns, returns those that are left out.
LeftOut = Callable[[str, str, ColumnRoles], frozenset[str]]

#: Size of the output buffer as a multiple of the responses' size; enough for usual rows, else it grows.
_GROWTH = 3

_NO_BYTES = np.zeros(0, np.uint8)
_FACTS_MIN = 64


class StreamEvent(NamedTuple):
    """An event that is neither a row nor a description of a table.

    `kind`: see `events`. `at` is the event's offset in the frames: earlier events made the frames before it;
    for a commit, the end of its frame. `body` is the message, or text, of the event's type: a `VGtid`, a
    `Journal`, a statement of DDL.
    """

    kind: int
    at: int
    time_s: int  # since 1970; 0: not known
    body: bytes


class StreamEvents(Sequence[StreamEvent]):
    """The events of some responses, created on access."""

    def __init__(self, facts: Numbers, data: bytes) -> None:
        self._facts = facts
        self._data = data

    def __len__(self) -> int:
        return len(self._facts)

    def __getitem__(self, number: Any) -> Any:
        return self._event(self._facts[number].tolist())

    def __iter__(self) -> Iterator[StreamEvent]:
        return map(self._event, self._facts.tolist())

    def of(self, *kinds: int) -> list[StreamEvent]:
        """Return the events of the given kinds."""
        types = self._facts[:, layout.FACT_TYPE]
        wanted = types == kinds[0]
        for kind in kinds[1:]:
            wanted |= types == kind
        return list(map(self._event, self._facts[wanted].tolist()))

    def _event(self, fact: list[int]) -> StreamEvent:
        kind, time_s, begin, end, at = fact
        return StreamEvent(kind, at, time_s, self._data[begin:end])


@dataclass(frozen=True, slots=True, eq=False)
class Transcoded:
    """The result of transcoding some responses.

    `frames` end with a complete transaction, unless `is_open`. `position` is that of the next transaction.
    """

    frames: Bytes
    position: int
    rows: int
    events: StreamEvents
    is_open: bool

    def end_of(self, vgtid: StreamEvent) -> int:
        """Return the offset in the frames at which the transaction of a VGTID ends."""
        commits = (event.at for event in self.events.of(events.COMMIT) if event.at >= vgtid.at)
        return next(commits, len(self.frames))


@dataclass(slots=True)
class _Work:
    """The input and the output buffers of one call."""

    data: bytes
    buffer: Bytes
    target: Bytes
    facts: Numbers
    patched: Bytes = field(default_factory=lambda: np.zeros(0, np.uint8))

    def grow(self, filled: int, needed: int) -> None:
        grown = np.empty(max(2 * len(self.target), filled + needed), np.uint8)
        grown[:filled] = self.target[:filled]
        self.target = grown


class Transcoder:
    """The transcoder of one shard's stream.

    :param tables: the tables of the log, shared by all shards.
    :param state: the shard's state in the log without its position.
    :param captures: given a table's name without its keyspace, returns whether its rows are captured.
    :param left_out: given keyspace, table and its columns, returns those that are not written to the log.
    :param is_view: given a table's name, returns whether it is a view: tablets copy views, too.
    """

    def __init__(
        self,
        keyspace: str,
        shard: str,
        tables: LogTables,
        state: Mapping[str, Any] | None = None,
        *,
        captures: Callable[[str], bool] = lambda _: True,
        left_out: LeftOut = lambda *_: frozenset(),
        is_view: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._keyspace, self._shard, self._tables = keyspace, shard, tables
        self._captures, self._left_out, self._is_view = captures, left_out, is_view
        self._names = tuple(np.frombuffer(name.encode(), np.uint8) for name in (keyspace, shard))
        self._watermark_us = 0
        self.set_state(state or {})
        self._kept: list[bytes] = []  # responses that are not transcoded yet
        self._kept_bytes = 0
        self._is_open = np.zeros(1, np.int64)
        shard_column = self._tables.shard_column
        self._shapes = ShardShapes({shard_column: self._shard} if shard_column else None)
        self._generation = self._tables.generation
        self._state = np.zeros(layout.STATE_FIELDS, np.int64)
        self._state[layout.BEGIN_AT] = self._state[layout.GTID_AT] = -1
        self._scratch = np.zeros(kernel.SCRATCH_FIELDS, np.int64)
        self._unwritten: bytes | None = None
        self._streamed: dict[str, Sequence[pb.Field]] = {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Set the shard's state, without `gtid`, that is written with each transaction from now on."""
        watermark = {"watermark": self._watermark_us} if self._watermark_us else {}
        more = json.dumps({**state, **watermark}, separators=(",", ":"))[1:-1]
        name = json.dumps(f"{self._keyspace}/{self._shard}")
        text = f'{{"shard":{name},"state":{{{more}{"," if more else ""}"gtid":"'
        self._extra = dict(state)
        self._before_state = np.frombuffer(text.encode(), np.uint8)

    def set_watermark(self, time_us: int) -> None:
        """Set the watermark that is written with each transaction from now on.

        :param time_us: the log has all shards' transactions before it. Microseconds since 1970; 0: unknown.
        """
        if time_us != self._watermark_us:
            self._watermark_us = time_us
            self.set_state(self._extra)

    @property
    def kept_bytes(self) -> int:
        """Number of bytes of responses whose transaction has not ended yet."""
        return self._kept_bytes

    def take_streamed(self) -> dict[str, Sequence[pb.Field]]:
        """Return the columns of captured tables that were described outside a copy since the last call."""
        found, self._streamed = self._streamed, {}
        return found

    def transcode(
        self, responses: Sequence[bytes], position: int, *, cut: bool = False, time_us: int = 0
    ) -> Transcoded:
        """Return the frames of responses, and of those that were kept before.

        :param position: the next transaction's; if the last frames were cut, that of the open transaction.
        :param cut: frames may end inside a transaction: nothing is kept, and nothing of another shard may be
            appended before the rest arrives. The transaction's time is that of its begin.
        :param time_us: the time of a copy's rows, microseconds since 1970.
        :raises TailraceError: `PROTOCOL_VIOLATION`, `SOURCE_MISCONFIGURED`, `DECODE_FAILED`. Nothing of these
            responses may be appended then, and the transcoder must not be used again.
        """
        data = self._whole(responses, cut=cut)
        if not data:
            return Transcoded(_NO_BYTES, position, 0, StreamEvents(np.zeros((0, 6), np.int64), b""), False)
        if self._tables.generation != self._generation:
            # Another shard has changed the shape of a table.
            self._shapes.take(lambda table: self._tables.shape(self._keyspace, table))
            self._generation = self._tables.generation
        state = self._state
        state[layout.AT] = state[layout.TO] = state[layout.ROWS] = state[layout.FACTS] = 0
        state[layout.BEGIN_AT] = -1
        state[layout.POSITION], state[layout.SNAPSHOT_TIME_US] = position, time_us
        state[layout.GTID_AT] = -1
        work = _Work(
            data,
            np.frombuffer(data, np.uint8),
            np.empty(_GROWTH * len(data) + 4096, np.uint8),
            np.empty((max(_FACTS_MIN, len(data) // 64), layout.FACT_FIELDS), np.int64),
        )
        transactions = int(state[layout.TRANSACTIONS])
        self._run(work)
        if state[layout.TRANSACTIONS] > transactions:
            self._unwritten = None
        if state[layout.GTID_AT] >= 0:
            self._unwritten = data[state[layout.GTID_AT] : state[layout.GTID_END]]
        return Transcoded(
            work.target[: state[layout.TO]],
            int(state[layout.POSITION]),
            int(state[layout.ROWS]),
            StreamEvents(work.facts[: state[layout.FACTS]], data),
            bool(state[layout.OPEN] >= layout.TRANSACTION),
        )

    @property
    def has_unwritten_position(self) -> bool:
        """Whether the shard's position advanced without rows of captured tables since its last frames."""
        return self._unwritten is not None

    def _whole(self, responses: Sequence[bytes], *, cut: bool) -> bytes:
        """Return the bytes that can be transcoded now: up to where no transaction is open."""
        came = b"".join(responses)
        if not came and not (cut and self._kept):
            return b""
        keyspace, shard = self._names
        event = np.zeros(events.EVENT_FIELDS, np.int64)
        found = events.last_boundary(np.frombuffer(came, np.uint8), keyspace, shard, self._is_open, event)
        if found < 0:
            raise failure(layout.BROKEN, self._keyspace, self._shard)
        if cut:
            found = len(came)
        if found == 0 and not cut:
            self._kept.append(came)
            self._kept_bytes += len(came)
            return b""
        whole = b"".join((*self._kept, came[:found]))
        self._kept = [came[found:]] if found < len(came) else []
        self._kept_bytes = len(came) - found
        return whole

    def _run(self, work: _Work) -> None:
        state, shapes = self._state, self._shapes
        while True:
            kernel.transcode(
                work.buffer, self._names[0], self._names[1], self._before_state, work.patched, shapes.texts,
                shapes.tables, shapes.slots, shapes.sources, shapes.targets, shapes.points, work.target,
                work.facts, state, self._scratch,
            )  # fmt: skip
            stopped = int(state[layout.STOPPED])
            if stopped == layout.DONE:
                return
            if stopped == layout.DESCRIBES:
                self._describe(work)
            elif stopped == layout.NEEDS_ROOM:
                work.grow(int(state[layout.TO]), int(state[layout.NEEDED]))
            elif stopped == layout.NEEDS_FACTS:
                work.facts = np.concatenate((work.facts, np.empty_like(work.facts)))
            elif stopped == layout.NEEDS_JSON:
                self._make_documents(work)
            else:
                where = shapes.where(int(state[layout.TABLE]), int(state[layout.COLUMN]))
                raise failure(
                    stopped, self._keyspace, self._shard, *where, kind=int(self._scratch[events.TYPE])
                )

    def _describe(self, work: _Work) -> None:
        """Process a FIELD event; write the table's description if it changed."""
        event = self._scratch
        try:
            found = pb.FieldEvent.FromString(work.data[event[events.BODY_AT] : event[events.BODY_END]])
        except DecodeError:
            raise failure(layout.BROKEN, self._keyspace, self._shard) from None
        self._state[layout.AT] = event[events.AFTER]
        if (found.keyspace or self._keyspace, found.shard or self._shard) != (self._keyspace, self._shard):
            return
        # vtgate prefixes the keyspace, unless the request excludes it.
        table, name = found.table_name.removeprefix(f"{self._keyspace}."), found.table_name.encode()
        is_taken = not found.is_internal_table and not is_internal(table) and self._captures(table)
        if not is_taken or (event[events.TIME_S] == 0 and self._is_view(table)):
            self._shapes.leave_out(name)
            return
        if event[events.TIME_S] != 0:
            self._streamed[table] = found.fields
        gone = self._gone(table, found.fields)
        columns = tuple(
            passed_over(each)
            if each.name in gone
            else self._plan(table, each, has_labels=found.enum_set_string_values)
            for each in found.fields
        )
        kept = tuple(column for column in columns if column.name)
        shape = self._tables.describe(self._keyspace, table, self._shard, kept, gone)
        if shape is not None:
            self._write(work, shape)
            self._generation = self._tables.generation
        self._shapes.put(name, columns, self._tables.shape(self._keyspace, table))

    def _gone(self, table: str, columns: Sequence[pb.Field]) -> frozenset[str]:
        return self._left_out(self._keyspace, table, roles_of(columns))

    def _plan(self, table: str, column: pb.Field, *, has_labels: bool) -> ColumnPlan:
        try:
            return plan_of(column, has_labels=has_labels)
        except Refused as reason:
            raise refused(reason, self._keyspace, self._shard, table, column.name) from None

    def _write(self, work: _Work, shape: TableShape) -> None:
        found = RowFrames()
        found.describe(shape)
        described = found.take()
        to = int(self._state[layout.TO])
        if len(work.target) - to < len(described):
            work.grow(to, len(described))
        work.target[to : to + len(described)] = described
        self._state[layout.TO] = to + len(described)

    def _make_documents(self, work: _Work) -> None:
        """Make the documents of a row that are sent as changes of the previous documents."""
        state, shapes = self._state, self._shapes
        table = shapes.tables[state[layout.TABLE]]
        first = int(table[layout.FIRST_SOURCE])
        patched = bytearray()
        for place, column in enumerate(shapes.columns(int(state[layout.TABLE]))):
            source = shapes.sources[first + place]
            if not column.is_json or source[layout.IS_JSON] != layout.A_CHANGE:
                continue
            begin, old = int(source[layout.BEGIN]), int(source[layout.OLD_BEGIN])
            text = work.data[begin : begin + int(source[layout.SIZE])]
            before = (
                work.data[old : old + int(source[layout.OLD_SIZE])] if source[layout.OLD_SIZE] >= 0 else None
            )
            made = changed_document(text, before) if column.name else b""
            if made is None:
                where = shapes.where(int(state[layout.TABLE]), place)
                raise failure(layout.NEEDS_JSON, self._keyspace, self._shard, *where)
            source[layout.BEGIN], source[layout.SIZE] = -1 - len(patched), len(made)
            patched += made
        work.patched = np.frombuffer(bytes(patched), np.uint8)
        state[layout.PATCHED] = 1


# Tables that Vitess creates for online DDL and garbage collection. A tablet leaves them out of its stream,
# but not of a copy. Source: Vitess' manual, "Table lifecycle" and "Online DDL".
_HEX = "[0-9a-fA-F]"
_UUID = f"{_HEX}{{8}}_{_HEX}{{4}}_{_HEX}{{4}}_{_HEX}{{4}}_{_HEX}{{12}}"
_INTERNAL = re.compile(
    rf"_vt_[a-zA-Z0-9]{{3}}_{_HEX}{{32}}_[0-9]{{14}}_"
    rf"|_vt_(HOLD|PURGE|EVAC|DROP)_{_HEX}{{32}}_[0-9]{{14}}"
    rf"|_{_UUID}_[0-9]{{14}}_(gho|ghc|del|new|vrepl)"
    r"|_.*_old",  # of pt-online-schema-change
    re.DOTALL,
)


def is_internal(table: str) -> bool:
    """Return whether a table of this name, without its keyspace, is Vitess' own."""
    return _INTERNAL.fullmatch(table) is not None
