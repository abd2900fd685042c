"""Copies by several streams at the same time: the log after rows, changes and kills in any order.

A fake server without gRPC sends what a tablet sends; the streams of chunks, the filtering and the coordinator
are the real ones.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tailrace.config.source.vitess import VitessSource
from tailrace.errors import TailraceError
from tailrace.sources.vitess.connection import vstream_pb2 as pb
from tailrace.sources.vitess.connection.metadata import integral_keys, primary_keys
from tailrace.sources.vitess.resharding.coordinator import Coordinator
from tailrace.sources.vitess.resharding.events import (
    CancelStream,
    ChunkReached,
    Command,
    EndReason,
    Event,
    Keep,
    ListShards,
    OpenStream,
    PositionReached,
    ShardsListed,
    ShardStreamEnded,
)
from tailrace.sources.vitess.resharding.gtid_sets import GtidSet
from tailrace.sources.vitess.resharding.shard_state import CopyChunk, ShardState
from tailrace.sources.vitess.resharding.transitions import Shard, ShardMode
from tailrace.sources.vitess.rows import change_filters
from tailrace.sources.vitess.rows.change_filters import (
    AmbiguousError,
    RepeatedChangeFilter,
)
from tailrace.sources.vitess.rows.copy_keys import common_key, key_text
from tailrace.sources.vitess.streaming import copy_plan, shard_copies
from tailrace.sources.vitess.streaming.copy_plan import parts_of, ranges
from tailrace.sources.vitess.streaming.one_stream_copies import OneStreamCopy
from tailrace.sources.vitess.streaming.shard_copies import ROWLESS_S, ChunkStream, ShardCopies
from tailrace.sources.vitess.streaming.shard_health import health_of
from tailrace.sources.vitess.streaming.stream_requests import chunk_request
from tests.support.examples import seeds

KEYSPACE, SHARD = "shop", "0"
UUID = "00000001-0000-11eb-b894-04ed332e05c2"
#: Keys of plums count as not integral when asked for.
TABLES = ("apples", "pears", "plums")
KEYS = range(-4, 8)

Image = tuple[int, int] | None  # a key and a value
Change = tuple[str, Image, Image]


@dataclass
class _Server:
    """A shard: its rows, and each transaction. A transaction's number is the value of its rows."""

    rows: dict[str, dict[int, int]] = field(default_factory=lambda: {table: {} for table in TABLES})
    binlog: list[list[Change]] = field(default_factory=lambda: [[]])

    def write(self, chance: random.Random) -> None:
        changes: list[Change] = []
        for _ in range(chance.randint(1, 3)):
            rows, value = self.rows[table := chance.choice(sorted(self.rows))], len(self.binlog) + 1
            key, to = chance.choice(KEYS), chance.choice(KEYS)
            before = (key, rows.pop(key)) if key in rows else None
            if before is not None and chance.random() < 0.3:
                changes.append((table, before, None))
                continue
            if before is None or to in rows or chance.random() < 0.6:
                to = key
            if before is not None and before[1] == value:
                rows[key] = value
                continue  # a key changes at most once in a transaction: its value identifies the change
            if any(each[0] == table and to in _keys(each) for each in changes):
                if before is not None:
                    rows[key] = before[1]
                continue
            rows[to] = value
            changes.append((table, before, (to, value)))
        self.binlog.append(changes)

    def gtid(self, last: int) -> str:
        return f"MySQL56/{UUID}:1-{last}"


def _keys(change: Change) -> set[int]:
    return {image[0] for image in change[1:] if image is not None}


class _Stream:
    """A tablet's responses to a request, one at a time."""

    def __init__(self, server: _Server, request: pb.VStreamRequest, chance: random.Random) -> None:
        self._server, self._chance = server, chance
        (self._wanted,) = request.vgtid.shard_gtids
        self._rules = request.filter.rules
        self._described: set[str] = set()
        self.responses = self._cut(self._all())

    def _cut(self, transactions: Iterator[list[pb.VEvent] | None]) -> Iterator[bytes | None]:
        for events in transactions:
            if events is None:
                yield None  # nothing now
                continue
            cut = self._chance.randint(0, len(events))
            for part in (events[:cut], events[cut:]):
                if part:
                    yield pb.VStreamResponse(events=part).SerializeToString()

    def _all(self) -> Iterator[list[pb.VEvent] | None]:
        wanted, server = self._wanted, self._server
        keys = list(wanted.table_pks)
        if wanted.gtid:
            place = int(re.split("[-:]", wanted.gtid)[-1])
        if not wanted.gtid or keys:
            table = self._rules[0].match
            is_gone_on_with, is_over = bool(wanted.gtid), False
            while not is_over:
                while is_gone_on_with and place < len(server.binlog):
                    place += 1
                    yield self._transaction(place, keys)
                place, rows = len(server.binlog), dict(server.rows.get(table, {}))
                yield [_event(pb.BEGIN), *self._field(table), self._vgtid(place, keys), _event(pb.COMMIT)]
                after = int(keys[0].last_pk.rows[0].values) if keys else KEYS[0] - 1
                left = [key for key in sorted(rows) if key > after and self._is_in(table, key)]
                # vtgate loses its tablet, and continues with another one at its position.
                is_lost = is_gone_on_with = False
                while left and not (is_lost := self._chance.random() < 0.05):
                    count = self._chance.randint(1, 3)
                    some, left = left[:count], left[count:]
                    found = [_row_event(table, None, (key, rows[key]), 0) for key in some]
                    keys = [pb.TableLastPk(table_name=table, last_pk=_key(some[-1]))]
                    yield [_event(pb.BEGIN), *found, self._vgtid(place, keys), _event(pb.COMMIT)]
                is_gone_on_with = is_lost and bool(keys)
                is_over = not is_gone_on_with
            if is_lost:
                server.write(self._chance)  # given only a position, a tablet treats the copy as complete
            else:
                yield [_event(pb.BEGIN), self._vgtid(place, []), _event(pb.COMMIT)]
                yield [pb.VEvent(type=pb.COPY_COMPLETED, keyspace=KEYSPACE, shard=SHARD)]
        while True:
            if place == len(server.binlog):
                yield None
            else:
                place += 1
                yield self._transaction(place, [])

    def _transaction(self, place: int, keys: Sequence[pb.TableLastPk]) -> list[pb.VEvent]:
        events = [_event(pb.BEGIN)]
        for table, *images in self._server.binlog[place - 1]:
            found = [image if image and self._is_in(table, image[0]) else None for image in images]
            if any(found):
                # Releases differ in whether they send the other image.
                sent = found if self._chance.random() < 0.5 else images
                events += [*self._field(table), _row_event(table, sent[0], sent[1], 1)]
        return [*events, self._vgtid(place, keys), _event(pb.COMMIT)]

    def _is_in(self, table: str, key: int) -> bool:
        for rule in self._rules:
            if rule.match.startswith("/"):
                return True
            if rule.match == table:
                # A tablet takes only literals, and `-9` is none.
                assert "-" not in rule.filter, rule.filter
                bounds = re.findall(r"`id` (>=|<) (\d+)", rule.filter)
                return all(key >= int(end) if sign == ">=" else key < int(end) for sign, end in bounds)
        return False

    def _field(self, table: str) -> list[pb.VEvent]:
        if table in self._described:
            return []
        self._described.add(table)
        found = pb.FieldEvent(table_name=table, keyspace=KEYSPACE, shard=SHARD)
        for name in ("value", "id"):
            found.fields.add(name=name, type=265)
        return [pb.VEvent(type=pb.FIELD, field_event=found)]

    def _vgtid(self, place: int, keys: Sequence[pb.TableLastPk]) -> pb.VEvent:
        found = _event(pb.VGTID)
        found.vgtid.shard_gtids.add(
            keyspace=KEYSPACE, shard=SHARD, gtid=self._server.gtid(place), table_pks=keys
        )
        return found


@dataclass
class _Log:
    """What is durable: rows and changes, each with its place in the binlog; states, as JSON."""

    appends: list[tuple[list[tuple[int, str, bool, Image, Image]], str]] = field(default_factory=list)

    def states(self) -> dict[str, ShardState]:
        texts = [state for _, state in self.appends if state]
        return {SHARD: ShardState.from_json(json.loads(texts[-1]))} if texts else {}


class _Capture:
    """One process of the capture: does what `KeyspaceStream` does with one shard."""

    def __init__(self, server: _Server, log: _Log, chance: random.Random) -> None:
        self._server, self._log, self._chance = server, log, chance
        source = VitessSource.model_validate(
            {"hosts": ["127.0.0.1:1"], "keyspace": KEYSPACE, "snapshot_connections": chance.choice([2, 3, 5])}
        )
        self._source = source
        self.coordinator = Coordinator(log.states(), (0,))
        nobody: Any = None  # asked for by the stream: `_planned` plans what is copied
        self.copies = ShardCopies(
            source, nobody, self.coordinator,
            self._step, self._start_chunk, self._stop, self._start,
        )  # fmt: skip
        self._streams: dict[str, tuple[int, _Stream]] = {}
        self._filters: dict[str, Any] = {}
        self._events: dict[str, list[pb.VEvent]] = {}
        self._is_asked = False  # the list of serving shards
        self._carry_out(self.coordinator.start())

    # What KeyspaceStream does

    def _step(self, event: Event) -> None:
        self._carry_out(self.coordinator.step(event))

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Keep():
                    self._append([], command)
                case OpenStream():
                    self.copies.end(SHARD)
                    self._streams.pop(SHARD, None)
                    if self.copies.takes(command):
                        self.copies.open(command)
                    else:
                        self._start(command)
                case CancelStream():
                    self.copies.end(SHARD)
                    self._streams.pop(SHARD, None)
                case ListShards():
                    self._is_asked = True

    def _start(self, command: OpenStream) -> None:
        assert self.coordinator.shards[SHARD].kept.copy is None, "one stream must not copy here"
        request = pb.VStreamRequest(filter=pb.Filter(rules=[pb.Rule(match="/.*")]))
        request.vgtid.shard_gtids.add(keyspace=KEYSPACE, shard=SHARD, gtid=command.positions[SHARD])
        self._open(SHARD, command.attempt, request)
        ahead = self.coordinator.shards[SHARD].kept.ahead
        self._filters[SHARD] = RepeatedChangeFilter(KEYSPACE, SHARD, ahead)

    def _start_chunk(self, stream: ChunkStream) -> None:
        self._open(stream.name, stream.attempt, chunk_request(self._source, SHARD, stream.chunk))

    def _open(self, name: str, attempt: int, request: pb.VStreamRequest) -> None:
        self._streams[name] = attempt, _Stream(self._server, request, self._chance)
        self._filters.pop(name, None)
        self._events[name] = []

    def _stop(self, stream: ChunkStream | OneStreamCopy) -> None:
        self._streams.pop(stream.name, None)

    def _append(self, changes: list[tuple[int, str, bool, Image, Image]], keep: Keep | None) -> None:
        state = json.dumps(keep.states[SHARD].as_json()) if keep else ""
        self._log.appends.append((changes, state))

    def advance(self) -> bool:
        """Process one waiting item, at random; return whether there was one."""
        if self._is_asked and self._chance.random() < 0.3:
            self._is_asked = False
            self._step(ShardsListed((SHARD,)))
            return True
        self.copies.turn(time.monotonic() + ROWLESS_S - 1)  # later than any reopening of a stream
        for name in self._chance.sample(sorted(self._streams), len(self._streams)):
            data = next(self._streams[name][1].responses)
            if data is not None:
                self._take(name, data)
                return True
        return self._is_asked

    def interrupt(self) -> None:
        """End one of the streams."""
        if self._streams:
            attempt, _ = self._streams.pop(self._chance.choice(sorted(self._streams)))
            self.copies.end(SHARD)
            self._step(ShardStreamEnded(SHARD, attempt, EndReason.INTERRUPTED))

    def _take(self, name: str, data: bytes) -> None:
        chosen = self.copies.streams.get(name) or self._filters.get(name)
        for each in [data] if chosen is None else chosen.left_of([data]):
            self._events[name] += pb.VStreamResponse.FromString(each).events
        held = self._events[name]
        last = max((at for at, event in enumerate(held) if event.type in _ENDS), default=-1)
        whole, self._events[name] = held[: last + 1], held[last + 1 :]
        if whole:
            self._write(name, whole)
        if (chunk := self.copies.streams.get(name)) is not None:
            self.copies.go_on(chunk, is_done=any(event.type == pb.COPY_COMPLETED for event in whole))

    def _write(self, name: str, events: Sequence[pb.VEvent]) -> None:
        attempt = self._streams[name][0]
        changes = list(_changes_of(events))
        chunk = self.copies.streams.get(name)
        positions = [event.vgtid.shard_gtids[0] for event in events if event.type == pb.VGTID]
        is_done = any(event.type == pb.COPY_COMPLETED for event in events)
        found: Event
        if chunk is None:
            if not positions:
                return self._append(changes, None)
            found = PositionReached(SHARD, attempt, positions[-1].gtid)
        else:
            for position in positions:
                keys = [key_text(chunk.chunk.table, each.last_pk) for each in position.table_pks]
                chunk.reach(position.gtid, "".join(keys))
            found = ChunkReached(SHARD, attempt, chunk.number, chunk.gtid, chunk.key, is_done)
        commands = self.coordinator.step(found)
        self._append(changes, next((each for each in commands if isinstance(each, Keep)), None))
        self._carry_out([each for each in commands if not isinstance(each, Keep)])
        return None


_ENDS = {pb.COMMIT, pb.COPY_COMPLETED}


def _changes_of(events: Sequence[pb.VEvent]) -> Iterator[tuple[int, str, bool, Image, Image]]:
    rows: list[pb.VEvent] = []
    for event in events:
        if event.type == pb.ROW:
            rows.append(event)
        elif event.type == pb.VGTID:
            place = int(re.split("[-:]", event.vgtid.shard_gtids[0].gtid)[-1])
            for row in rows:
                for change in row.row_event.row_changes:
                    before = _image(change.before) if change.HasField("before") else None
                    after = _image(change.after) if change.HasField("after") else None
                    yield place, row.row_event.table_name, row.timestamp == 0, before, after
            rows.clear()


def _image(row: pb.Row) -> Image:
    value, key = (int(text) for text in (row.values[: row.lengths[0]], row.values[row.lengths[0] :]))
    return key, value


def _row(image: tuple[int, int]) -> pb.Row:
    key, value = (str(each).encode() for each in image)
    return pb.Row(lengths=[len(value), len(key)], values=value + key)


def _row_event(table: str, before: Image, after: Image, time_s: int) -> pb.VEvent:
    change = pb.RowChange(before=before and _row(before), after=after and _row(after))
    found = pb.RowEvent(table_name=table, keyspace=KEYSPACE, shard=SHARD, row_changes=[change])
    return pb.VEvent(type=pb.ROW, timestamp=time_s, row_event=found)


def _event(kind: pb.EventType) -> pb.VEvent:
    return pb.VEvent(type=kind, timestamp=1, keyspace=KEYSPACE, shard=SHARD)


def _key(key: int) -> pb.QueryResult:
    text = str(key).encode()
    row = pb.Row(lengths=[len(text)], values=text)
    return pb.QueryResult(fields=[pb.Field(name="id", type=265)], rows=[row])


def _planned(server: _Server, before: Sequence[CopyChunk]) -> tuple[CopyChunk, ...]:
    begun = {chunk.table for chunk in before if chunk.is_begun}
    found = [part for chunk in before if chunk.table in begun for part in parts_of(chunk, is_there=True)]
    for table in server.rows:
        if table not in begun and table == "plums":
            found.append(CopyChunk(table))
        elif table not in begun:
            found += ranges(table, "id", KEYS[0], KEYS[-1], 3 if table == "apples" else 1)
    return tuple(found)


def _by_key(
    changes: Iterator[tuple[int, str, bool, Image, Image]],
) -> dict[tuple[str, int], list[tuple[int, bool, int | None]]]:
    """Return the states of each key: the value, whether a copy read it, and None once it is deleted."""
    found: dict[tuple[str, int], list[tuple[int, bool, int | None]]] = defaultdict(list)
    for version, table, is_copied, before, after in changes:
        if before is not None and (after is None or after[0] != before[0]):
            found[table, before[0]].append((version, is_copied, None))
        if after is not None:
            found[table, after[0]].append((after[1], is_copied, after[1]))
    return found


@pytest.mark.parametrize("seed", seeds(100, quick=20))
def test_rows_come_once_and_every_change_after_them_once_and_in_order(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    server, log = _Server(), _Log()
    monkeypatch.setattr(shard_copies, "planned_chunks", lambda *given: _planned(server, given[3]))
    for _ in range(chance.randint(0, 30)):
        server.write(chance)
    capture = _Capture(server, log, chance)
    writes = chance.choice([0.1, 0.3, 0.6])
    for _ in range(chance.randint(20, 200)):
        what = chance.random()
        if what < writes:
            server.write(chance)
        elif what < writes + 0.03:
            # What was appended last need not be durable.
            del log.appends[max(0, len(log.appends) - chance.randint(0, 3)) :]
            capture = _Capture(server, log, chance)
        elif what < writes + 0.05:
            capture.interrupt()
        elif what < writes + 0.06 and len(server.rows) < 4:
            server.rows["quinces"] = {}
        else:
            capture.advance()
    while capture.advance():
        pass
    _assert_exact(server, log)
    _assert_whole(log)
    shard = capture.coordinator.shards[SHARD]
    assert (shard.kept.copy, shard.kept.ahead, shard.kept.begun) == (None, (), "")
    assert GtidSet.parse(shard.kept.gtid).contains(GtidSet.parse(server.gtid(len(server.binlog))))


def _assert_exact(server: _Server, log: _Log) -> None:
    written = _by_key(
        (number, table, False, before, after)
        for number, changes in enumerate(server.binlog, 1)
        for table, before, after in changes
    )
    logged = _by_key(
        (0, table, is_copied, before, after)
        for changes, _ in log.appends
        for _, table, is_copied, before, after in changes
    )
    mirror: dict[str, dict[int, int]] = {table: {} for table in server.rows}
    for (table, key), found in logged.items():
        if found[-1][2] is not None:
            mirror[table][key] = found[-1][2]
    assert mirror == server.rows
    for where, found in logged.items():
        all_values = [value for _, _, value in written[where]]
        copied = [at for at, each in enumerate(found) if each[1]]
        assert len(copied) <= 1, (where, found)
        values = [value for _, _, value in found]
        if copied:
            (at,) = copied
            place = all_values.index(values[at])
            assert values[at + 1 :] == all_values[place + 1 :], (where, found, written[where])
            values = values[:at]
            # Changes from before its row was read: a part of those that led to it, without a gap.
            assert not values or where[0] == "plums", (where, found)
            assert not values or values == all_values[place + 1 - len(values) : place + 1], (where, found)
        else:
            assert values == all_values[len(all_values) - len(values) :], (where, found, written[where])


def _assert_whole(log: _Log) -> None:
    """Check that the changes of a transaction are one transaction of the log; only those of a table without
    integral keys may have come before, where its copy was interrupted.
    """
    appends: dict[int, set[int]] = defaultdict(set)
    of_plums: dict[int, set[int]] = defaultdict(set)
    for number, (changes, _) in enumerate(log.appends):
        for place, table, is_copied, _, _ in changes:
            if not is_copied:
                (of_plums if table == "plums" else appends)[place].add(number)
    for place, numbers in appends.items():
        assert len(numbers) == 1, place
        assert max(of_plums.get(place, numbers)) <= max(numbers), place
    assert all(len(numbers) == 1 for numbers in of_plums.values())


def test_positions_that_cannot_be_ordered_are_refused() -> None:
    other = UUID.replace("1", "2", 1)
    chunks = [CopyChunk("a", gtid=f"MySQL56/{UUID}:1-5"), CopyChunk("b", gtid=f"MySQL56/{other}:1-5")]
    with pytest.raises(AmbiguousError):
        RepeatedChangeFilter(KEYSPACE, SHARD, chunks)


def test_a_large_transaction_after_a_chunks_position_is_not_filtered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(change_filters, "HELD_BYTES_MAX", 100)
    (server := _Server()).binlog += [[("apples", None, (1, 2))], [("apples", None, (2, 3))] * 9]
    chunk = CopyChunk("apples", "id", gtid=server.gtid(2))
    chosen = RepeatedChangeFilter(KEYSPACE, SHARD, [chunk])
    request = pb.VStreamRequest(filter=pb.Filter(rules=[pb.Rule(match="/.*")]))
    request.vgtid.shard_gtids.add(keyspace=KEYSPACE, shard=SHARD, gtid=server.gtid(1))
    sent = itertools.takewhile(bool, _Stream(server, request, random.Random(1)).responses)
    events = [event for data in sent for event in pb.VStreamResponse.FromString(data or b"").events]
    one_by_one = [pb.VStreamResponse(events=[event]).SerializeToString() for event in events]
    left = [pb.VStreamResponse.FromString(data) for data in chosen.left_of(one_by_one)]
    places = [place for response in left for place, *_ in _changes_of(response.events)]
    assert places == [3] * 9
    assert chosen.is_over


def test_changes_whose_columns_the_server_cannot_name_are_left_to_the_transcoder() -> None:
    (server := _Server()).binlog += [[("apples", None, (1, 2))]]
    chunk = CopyChunk("apples", "id", 0, 9, gtid=server.gtid(2))
    chosen = RepeatedChangeFilter(KEYSPACE, SHARD, [chunk])
    request = pb.VStreamRequest(filter=pb.Filter(rules=[pb.Rule(match="/.*")]))
    request.vgtid.shard_gtids.add(keyspace=KEYSPACE, shard=SHARD, gtid=server.gtid(1))
    sent = itertools.takewhile(bool, _Stream(server, request, random.Random(1)).responses)
    events = [event for data in sent for event in pb.VStreamResponse.FromString(data or b"").events]
    for event in events:
        for number, column in enumerate(event.field_event.fields, 1):
            column.name = f"@{number}"
    (left,) = chosen.left_of([pb.VStreamResponse(events=events).SerializeToString()])
    assert list(pb.VStreamResponse.FromString(left).events) == events


def test_an_interrupted_chunk_is_divided_after_its_last_key() -> None:
    begun = CopyChunk("a", "id", 3, 9, f"MySQL56/{UUID}:1-5", key_text("a", _key(5)))
    done, rest = parts_of(begun, is_there=True)
    assert (done.low, done.high, done.gtid, done.is_done) == (3, 6, begun.gtid, True)
    assert rest == CopyChunk("a", "id", 6, 9)
    (last,) = parts_of(replace(begun, high=6), is_there=True)
    assert last.is_done
    (gone,) = parts_of(begun, is_there=False)
    assert gone == replace(begun, is_done=True)
    text = pb.QueryResult(fields=[pb.Field(name="id", type=6165)], rows=_key(5).rows)
    with pytest.raises(TailraceError, match="not one whole number"):
        list(parts_of(replace(begun, key=key_text("a", text)), is_there=True))


def test_status_lists_the_tables_whose_rows_are_ahead_of_their_shard() -> None:
    chunks = [CopyChunk(table, gtid=f"MySQL56/{UUID}:1-{last}") for table, last in (("b", 9), ("a", 8))]
    shard = Shard(ShardMode.STREAMING, kept=ShardState(f"MySQL56/{UUID}:1-7", ahead=tuple(chunks)))
    health = health_of({SHARD: shard}, {}, {})
    assert health.details["shards"][SHARD]["ahead"] == ["a", "b"]


def test_keys_are_in_one_range_each() -> None:
    for first, last, parts in ((-5, 5, 3), (0, 1, 7), (3, 3, 2), (-9, -1, 3), (-(1 << 63), (1 << 63) - 1, 5)):
        found = ranges("t", "id", first, last, parts)
        # A tablet accepts no negative bound.
        assert all(chunk.low is None or chunk.low >= 0 for chunk in found)
        for key in {first - 1, first, last, last + 1, (first + last) // 2}:
            assert sum(chunk.contains(key) for chunk in found) == 1


class _InformationSchema:
    """Answers like a tablet whose MySQL has some tables."""

    _PRIMARY = ("whole bigint PRIMARY PRI", *2 * ("two int PRIMARY PRI",), "text varchar PRIMARY PRI")
    #: MySQL calls the first unique key of a table without a primary key PRI, too.
    _UNIQUE = ("none bigint ua PRI", "none int ub UNI")

    def __init__(self) -> None:
        self._database = sqlite3.connect(":memory:")
        self._database.create_function("database", 0, lambda: KEYSPACE)
        self._database.executescript(
            "attach ':memory:' as information_schema;"
            "create table information_schema.tables (table_schema, table_name, table_type);"
            "create table information_schema.statistics"
            " (table_schema, table_name, index_name, column_name, seq_in_index);"
            "create table information_schema.columns"
            " (table_schema, table_name, column_name, data_type, column_key);"
        )
        found = [each.split() for each in (*self._PRIMARY, *self._UNIQUE)]
        for table in sorted({table for table, *_ in found}):
            self._put("tables", table, "BASE TABLE")
        self._put("tables", "view", "VIEW")
        for number, (table, kind, index, key) in enumerate(found):
            self._put("statistics", table, index, f"c{number}", str(9 - number))
            self._put("columns", table, f"c{number}", kind, key)

    def _put(self, table: str, *values: str) -> None:
        given = ", ".join("?" * (len(values) + 1))
        self._database.execute(
            f"insert into information_schema.{table} values ({given})",
            (KEYSPACE, *values),
        )

    def query(self, sql: str, attempted: str, target: str) -> list[Any]:
        return self._database.execute(sql).fetchall()


def test_a_copy_is_divided_only_by_primary_keys() -> None:
    source = VitessSource.model_validate({"hosts": ["127.0.0.1:1"], "keyspace": KEYSPACE})
    vtgate: Any = _InformationSchema()
    # A tablet copies `none` in the order of its cheapest unique key, which need not be the one called PRI.
    assert integral_keys(vtgate, source, SHARD) == {"whole": "c0", "two": "", "text": "", "none": ""}
    keys = {table: list(key) for table, key in primary_keys(vtgate, source, SHARD).items()}
    assert keys == {"whole": ["c0"], "two": ["c2", "c1"], "text": ["c3"], "none": []}


class _KilledError(Exception):
    """Raised after an append."""


def _begun(
    source: VitessSource, states: dict[str, Any], killed_at: int = -1
) -> tuple[list[dict[str, Any]], list[str]]:
    """Begin with a shard, or continue it, as a stream of the keyspace does.

    :param killed_at: the append after which the process dies.
    :return: what was appended; and the tables that are copied, or the position of the one stream.
    """
    appended, opened = list[dict[str, Any]](), list[str]()
    kept = {name: ShardState.from_json(state) for name, state in states.items()}
    coordinator = Coordinator(kept, common_key=common_key)

    def carry_out(commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Keep):
                appended.append({name: state.as_json() for name, state in command.states.items()})
                if len(appended) == killed_at:
                    raise _KilledError
            elif isinstance(command, ListShards):
                carry_out(coordinator.step(ShardsListed((SHARD,))))
            elif isinstance(command, OpenStream):
                copies.end(command.shard)
                if copies.takes(command):
                    copies.open(command)
                else:
                    opened.append(command.positions[command.shard])

    def step(event: Event) -> None:
        carry_out(coordinator.step(event))

    nobody: Any = None  # asked for by the stream: the answers are given
    copies = ShardCopies(
        source, nobody, coordinator, step, lambda stream: opened.append(stream.chunk.table),
        lambda _: None, lambda _: None,
    )  # fmt: skip
    with contextlib.suppress(_KilledError):
        carry_out(coordinator.start())
        copies.turn(time.monotonic() + 60)
    return appended, opened


@pytest.mark.parametrize("later", [[], ["later"]], ids=["no table", "a table that came meanwhile"])
def test_the_start_of_a_shard_without_tables_is_continued_after_a_kill_anywhere(
    monkeypatch: pytest.MonkeyPatch, later: list[str]
) -> None:
    source = VitessSource.model_validate({"hosts": ["127.0.0.1:1"], "keyspace": KEYSPACE})
    tables: list[str] = []
    monkeypatch.setattr(copy_plan, "integral_keys", lambda *_: dict.fromkeys(tables, ""))
    monkeypatch.setattr(shard_copies, "ask_gtids", lambda *_: None)
    monkeypatch.setattr(shard_copies, "answer_of", lambda *_: [[f"{UUID}:1-{7 + len(tables)}"]])
    position = str(GtidSet.parse(f"{UUID}:1-7"))
    whole, opened = _begun(source, {})
    assert opened == [position]
    assert len(whole) > 3
    for killed_at in range(1, len(whole) + 1):
        tables.clear()
        appended, _ = _begun(source, {}, killed_at)
        in_log = {name: state for states in appended for name, state in states.items()}
        tables.extend(later)
        after, opened = _begun(source, in_log)
        in_log |= {name: state for states in after for name, state in states.items()}
        state = ShardState.from_json(in_log[SHARD])
        # The stream has a table created after the position from there on; otherwise it is copied.
        assert opened == ([position] if state.copy is None else later), killed_at
        if state.copy is None:
            assert state.gtid == position, killed_at
