"""A fake vtgate: real gRPC before shards that a test writes, reshards, silences and breaks.

Each shard has a binlog of changes of one table, `counters(id bigint, counter bigint)`, and journals. As with
vtgate, a stream of one shard that reaches a journal of several ends with INTERNAL, with or without the
journal before it; and heartbeats go on, whatever the shard does.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import grpc
import grpc.aio

from tailrace.sources.vitess.connection import vstream_pb2 as pb

KEYSPACE = "shop"
TABLE, VIEW = "counters", "view_of_counters"
SERVICE = "vtgateservice.Vitess"
_COLUMNS = (("id", 3), ("counter", 1), ("extra", 0))  # with their flags: NOT NULL, and of the primary key
_BIGINT = 265
_WAIT_S = 10.0

T = TypeVar("T")


@dataclass(slots=True)
class FakeShard:
    """One shard. Entry n of `binlog` is the transaction n + 1 of `server`.

    :param rows: what a copy reads.
    :param purged: so many transactions are no longer available.
    :param lag: so many of the newest transactions its replicas lack when asked for their position.
    :param is_silent: its streams bring only heartbeats.
    :param has_tablet: else its streams are silent, and it answers nothing.
    :param is_cut: each event of a transaction comes in a separate response.
    :param allowed: so many more responses of copies and of cut transactions are sent; None: all.
    :param has_table: else it has no table that could be copied.
    :param has_view: a copy of all tables reads a view of its rows, too.
    :param lost_copies: so many of the next copies have no rows: their tablet ended before the first one.
    :param is_reopened: if something is committed during the next copy, its tablet ends, and vtgate continues
        at another one, from its last position and key.
    :param sorts_s: so long a tablet takes before the first row of a copy, with its position or without.
    :param tells_position_first: whether the copy's position comes before that wait.
    :param loses_journal: the journal of several shards is lost on the way.
    :param is_unnamed: columns come without their names, as of a table that was altered since.
    :param is_altered_within: a transaction's last row comes once more, after a second description of its
        table, without names.
    :param altered: from this entry of the binlog on, rows have a third column, `extra`.
    :param unreadable: by its number, what comes of a transaction: a `statement`, or a row without `values`.
    :param errors: code and message with which its next streams end at once.
    :param switching: so many of the next requests come while traffic is switched.
    """

    server: str
    binlog: list[Sequence[tuple[int, int]] | pb.Journal] = field(default_factory=lambda: [()])
    rows: dict[int, int] = field(default_factory=dict)
    serves: bool = True
    purged: int = 0
    lag: int = 0
    is_silent: bool = False
    has_tablet: bool = True
    is_cut: bool = False
    allowed: int | None = None
    has_table: bool = True
    has_view: bool = False
    lost_copies: int = 0
    is_reopened: bool = False
    sorts_s: float = 0.0
    tells_position_first: bool = False
    loses_journal: bool = False
    is_unnamed: bool = False
    is_altered_within: bool = False
    altered: int | None = None
    unreadable: dict[int, str] = field(default_factory=dict)
    errors: list[tuple[grpc.StatusCode, str]] = field(default_factory=list)
    switching: int = 0

    def gtid(self, last: int | None = None) -> str:
        """Return the position after the transaction `last`; None: after the newest."""
        return f"MySQL56/{self.server}:1-{len(self.binlog) if last is None else last}"


class FakeVtgate:
    """See the module. Its methods are for the test's thread; it stops at the end of its `with`.

    :param credentials: of TLS. None: plain text.
    :param user: name and password that calls must have; None: none.
    """

    keyspace = KEYSPACE

    def __init__(
        self,
        *shards: str,
        credentials: grpc.ServerCredentials | None = None,
        user: tuple[str, str] | None = None,
    ) -> None:
        self.shards = {name: FakeShard(_server(number)) for number, name in enumerate(shards)}
        self.requests: list[pb.VStreamRequest] = []
        self.asked: list[str] = []  # the targets that were asked for their position
        self.peers: set[str] = set()
        self.open_streams = 0
        self.release = 22
        self.cascades: list[list[str]] = []  # tables with the names of their foreign keys that change rows
        # Table, column, type, whether it may be NULL, key, collation and character set of each column.
        self.columns: list[list[str]] = [
            [TABLE, "id", "bigint", "NO", "PRI", "0", ""],
            [TABLE, "counter", "bigint", "NO", "", "0", ""],
        ]
        self.empty_lists = 0  # so many of the next answers to a request for the shards have none
        self.row_image = "FULL"
        self._servers = len(shards)
        self._credentials, self._user = credentials, user
        self._port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._changed = asyncio.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        self._wait(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._wait(self._server.stop(None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_WAIT_S)
        self._loop.close()

    @property
    def address(self) -> str:
        """The address on which it listens."""
        return f"127.0.0.1:{self._port}"

    # ------------------------------------------------------------------ for tests

    def write(self, shard: str, *changes: tuple[int, int]) -> None:
        """Commit a transaction: keys, each with its counter."""
        with self._changes():
            self._commit(shard, changes)

    def reshard(self, sources: Sequence[str], targets: Sequence[str], *, has_journal: bool = True) -> None:
        """Switch traffic: each source gets the journal, each target serves from a position of its own.

        :param has_journal: false: no source gets one, as Vitess 22 may switch back to shards of former names.
        """
        with self._changes():
            for name in targets:
                if name not in self.shards:
                    self.shards[name] = FakeShard(_server(self._servers))
                    self._servers += 1
                target = self.shards[name]
                # Copied rows: a reader of a target from before its position sees them.
                copied = [found for source in sources for found in self.shards[source].rows.items()]
                target.rows = dict(copied)
                target.binlog.append(copied)
                target.serves = True
            journal = pb.Journal(id=7, migration_type=pb.SHARDS)
            for name in targets:
                journal.shard_gtids.add(keyspace=KEYSPACE, shard=name, gtid=self.shards[name].gtid())
            for name in sources:
                journal.participants.add(keyspace=KEYSPACE, shard=name)
            for name in sources:
                if has_journal:
                    self.shards[name].binlog.append(journal)
                self.shards[name].serves = False

    def complete(self, *sources: str) -> None:
        """Delete the source shards of a reshard."""
        with self._changes():
            for name in sources:
                del self.shards[name]

    def restore(self, shard: str, transactions: int) -> None:
        """Reset a shard to its first transactions, as a backup does, or a failover that lost some."""
        with self._changes():
            found = self.shards[shard]
            del found.binlog[transactions:]
            found.rows = {
                key: counter
                for each in found.binlog
                if not isinstance(each, pb.Journal)
                for key, counter in each
            }

    def change(self, shard: str, **fields: Any) -> None:
        """Set fields of a shard."""
        with self._changes():
            for name, value in fields.items():
                setattr(self.shards[shard], name, value)

    def restart(self) -> None:
        """End all connections, and listen again on the same address."""
        self._wait(self._server.stop(None))
        self._wait(self._listen())

    # ------------------------------------------------------------------ the server

    async def _listen(self) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "VStream": grpc.unary_stream_rpc_method_handler(
                self._stream, pb.VStreamRequest.FromString, pb.VStreamResponse.SerializeToString
            ),
            "Execute": grpc.unary_unary_rpc_method_handler(
                self._execute, pb.ExecuteRequest.FromString, pb.ExecuteResponse.SerializeToString
            ),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        address = f"127.0.0.1:{self._port}"
        if self._credentials is None:
            self._port = self._server.add_insecure_port(address)
        else:
            self._port = self._server.add_secure_port(address, self._credentials)
        await self._server.start()

    async def _execute(self, request: pb.ExecuteRequest, context: Any) -> pb.ExecuteResponse:
        await self._let_in(context)
        sql = request.query.sql.lower()
        found = pb.ExecuteResponse()
        asked = self.shards.get(request.session.target_string.partition(":")[2].partition("@")[0])
        if asked is not None and asked.switching:
            asked.switching -= 1
            return _refused(17, "current keyspace is being resharded")
        if "vitess_shards" in sql:
            rows = [[f"{KEYSPACE}/{name}"] for name, shard in self.shards.items() if shard.serves]
            if self.empty_lists:
                self.empty_lists, rows = self.empty_lists - 1, []
        elif "vitess_tablets" in sql:
            rows = [
                ["zone1", KEYSPACE, name, "PRIMARY", "SERVING", f"zone1-{number}", "127.0.0.1", ""]
                for number, name in enumerate(self.shards)
            ]
        elif "gtid_executed" in sql:
            target = request.session.target_string
            self.asked.append(target)
            name, _, of = target.partition(":")[2].partition("@")
            if (shard := self._answering(name)) is None:
                return _refused()
            purged = f"{shard.server}:1-{shard.purged}" if shard.purged else ""
            newest = len(shard.binlog) - (0 if of == "primary" else shard.lag)
            rows = [[shard.gtid(newest).partition("/")[2], purged]]
        elif "binlog_row_image" in sql:
            rows = [[self.row_image, "ROW", "ON"]]
        elif "vschema keyspaces" in sql:
            rows = [[KEYSPACE, "true", "unmanaged", ""]]
        elif "referential_constraints" in sql:
            rows = self.cascades
        elif "version_comment" in sql:
            rows = [[f"Version: {self.release}.0.1 (Git revision branch '')"]]
        elif "min(`id`)" in sql:
            name = request.session.target_string.partition(":")[2].partition("@")[0]
            keys = self.shards[name].rows
            rows = [[str(min(keys)), str(max(keys)), str(len(keys))]] if keys else []
            if not keys:
                found.result.rows.append(pb.Row(lengths=[-1, -1, 1], values=b"0"))
        elif "information_schema.statistics" in sql:
            name = request.session.target_string.partition(":")[2].partition("@")[0]
            if (shard := self._answering(name)) is None:
                return _refused()
            rows = [[TABLE, "id", "bigint"]] if shard.has_table else []
        elif "information_schema.views" in sql:
            name = request.session.target_string.partition(":")[2].partition("@")[0]
            if (shard := self._answering(name)) is None:
                return _refused()
            rows = [[VIEW]] if shard.has_view else []
        elif "information_schema.columns" in sql and "column_type" in sql:
            rows = self.columns
        elif "information_schema.columns" in sql:
            name = request.session.target_string.partition(":")[2].partition("@")[0]
            if self._answering(name) is None:
                return _refused()
            rows = [["extra", "5", ""]]
        elif "desc limit 1" in sql:
            name = request.session.target_string.partition(":")[2].partition("@")[0]
            last = max(self.shards[name].rows, default=None)
            rows = [] if last is None else [[str(last)]]
            found.result.fields.add(name="id", type=_BIGINT)
        else:
            rows = [[TABLE]] if "tables" in sql else [["1"]]
        for row in rows:
            found.result.rows.append(_row([cell.encode() for cell in row]))
        return found

    def _answering(self, name: str) -> FakeShard | None:
        shard = self.shards.get(name)
        return shard if shard is not None and shard.serves and shard.has_tablet else None

    async def _stream(self, request: pb.VStreamRequest, context: Any) -> AsyncIterator[pb.VStreamResponse]:
        await self._let_in(context)
        self.requests.append(request)
        self.peers.add(context.peer())
        self.open_streams += 1
        try:
            for wanted in request.vgtid.shard_gtids:
                if wanted.shard not in self.shards:
                    words = f"shard provided in VGTID, {wanted.shard}, not found in the {KEYSPACE} keyspace"
                    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, words)
                if wanted.gtid == "" and not self.shards[wanted.shard].has_table:
                    words = "vttablet: stream needs a position or a table to copy"
                    await context.abort(grpc.StatusCode.UNKNOWN, words)
            for rule in request.filter.rules:
                # vttablet takes only literals here, and `-9` is none.
                if (negative := re.search(r"-\d+", rule.filter)) is not None:
                    await context.abort(grpc.StatusCode.UNKNOWN, f"vttablet: unexpected: {negative[0]}")
            names = [wanted.shard for wanted in request.vgtid.shard_gtids]
            following = _Following(names, request)
            while True:
                changed = self._changed
                sent = False
                for wanted in request.vgtid.shard_gtids:
                    async for response in self._of_a_shard(wanted.shard, following, context):
                        sent = True
                        yield response
                if not sent:
                    async for heartbeat in self._heartbeat(changed, following.heartbeat_s):
                        yield heartbeat
        finally:
            self.open_streams -= 1

    async def _heartbeat(
        self, changed: asyncio.Event, interval_s: float | None
    ) -> AsyncIterator[pb.VStreamResponse]:
        try:
            await asyncio.wait_for(changed.wait(), interval_s)
        except TimeoutError:
            yield _response(pb.VEvent(type=pb.HEARTBEAT, timestamp=_now_s()))

    async def _of_a_shard(
        self, name: str, following: _Following, context: Any
    ) -> AsyncIterator[pb.VStreamResponse]:
        shard = self.shards.get(name)
        if shard is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"vttablet: the shard {name} is gone")
            return
        if shard.errors:
            code, words = shard.errors.pop(0)
            await context.abort(code, words)
        if shard.is_silent or not shard.has_tablet or name in following.over:
            return
        async for response in following.copied(name, shard):
            async for heartbeat in self._allowed(shard, following):
                yield heartbeat
            yield response
        place = following.places[name]
        if place > len(shard.binlog):
            return  # a position ahead of the server: only heartbeats
        if place < shard.purged:
            words = "Cannot replicate because the master purged required binary logs. (errno 1236)"
            await context.abort(grpc.StatusCode.UNKNOWN, words)
        if place == len(shard.binlog):
            return
        following.places[name] += 1
        entry = shard.binlog[place]
        if not isinstance(entry, pb.Journal):
            whole = following.transaction(name, shard, entry)
            for part in map(_response, whole.events) if shard.is_cut else ():
                async for heartbeat in self._allowed(shard, following):
                    yield heartbeat
                yield part
            if not shard.is_cut:
                yield whole
            return
        participants = {each.shard for each in entry.participants}
        is_alone = not participants <= following.names
        if not (is_alone and shard.loses_journal):
            yield following.journal(name, shard, entry)
        following.over.add(name)
        if is_alone:
            listed = " ".join(f'keyspace:"{KEYSPACE}" shard:"{each}"' for each in sorted(participants))
            words = f"not all journaling participants are in the stream: journal: [{listed}], stream: []"
            await context.abort(grpc.StatusCode.INTERNAL, words)

    async def _allowed(self, shard: FakeShard, following: _Following) -> AsyncIterator[pb.VStreamResponse]:
        while shard.allowed == 0:
            async for heartbeat in self._heartbeat(self._changed, following.heartbeat_s):
                yield heartbeat
        if shard.allowed is not None:
            shard.allowed -= 1

    async def _let_in(self, context: Any) -> None:
        if self._user is not None:
            given = dict(context.invocation_metadata())
            if (given.get("username"), given.get("password")) != self._user:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "username and password must be provided")

    # ------------------------------------------------------------------ between the threads

    def _commit(self, shard: str, changes: Sequence[tuple[int, int]]) -> None:
        found = self.shards[shard]
        found.binlog.append(changes)
        found.rows |= dict(changes)

    def _changes(self) -> _Changes:
        return _Changes(self)

    async def _wake(self) -> None:
        before, self._changed = self._changed, asyncio.Event()
        before.set()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        found: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return found.result(_WAIT_S)


class _Changes:
    """A change of the shards by the test, in its own thread, while the streams wait."""

    def __init__(self, vtgate: FakeVtgate) -> None:
        self._vtgate = vtgate
        self._entered, self._left = threading.Event(), threading.Event()

    def __enter__(self) -> None:
        self._vtgate._loop.call_soon_threadsafe(self._hold)
        assert self._entered.wait(_WAIT_S)

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._vtgate._wait(self._vtgate._wake())

    def _hold(self) -> None:
        self._entered.set()
        self._left.wait(_WAIT_S)


class _Following:
    """One stream, with its position in each of its shards."""

    def __init__(self, names: Sequence[str], request: pb.VStreamRequest) -> None:
        self.names = frozenset(names)
        self.places: dict[str, int] = {}
        self.over: set[str] = set()
        self._wanted = {each.shard: each for each in request.vgtid.shard_gtids}
        self.heartbeat_s = request.flags.heartbeat_interval or None
        self._is_in = _condition(request.filter.rules)
        self._is_of_all = any(rule.match.startswith("/") for rule in request.filter.rules)
        self._described: set[tuple[str, int]] = set()
        self._positions: dict[str, str] = {name: self._wanted[name].gtid for name in names}
        self._table = TABLE if request.flags.exclude_keyspace_from_table_name else f"{KEYSPACE}.{TABLE}"

    async def copied(self, name: str, shard: FakeShard) -> AsyncIterator[pb.VStreamResponse]:
        """Yield what comes before the binlog, once: the newest position, or the rows."""
        if name in self.places:
            return
        wanted = self._wanted[name]
        if wanted.gtid not in {"", "current"}:
            if wanted.gtid.partition("/")[2].partition(":")[0] != shard.server:
                self.places[name] = 1 << 60
            else:
                self.places[name] = int(re.split("[-:]", wanted.gtid)[-1])
        else:
            self.places[name] = len(shard.binlog)
        self._positions[name] = shard.gtid(min(self.places[name], len(shard.binlog)))
        if wanted.gtid == "current":
            yield _response(self._vgtid(name), _event(pb.OTHER, name))
        elif wanted.table_pks and wanted.gtid:
            for response in self._continued(name, shard, wanted.table_pks):
                yield response
        elif wanted.gtid == "" or wanted.table_pks:
            keys: Sequence[pb.TableLastPk] = ()
            for number, response in enumerate(self._copy(name, shard, wanted.table_pks)):
                if number == int(shard.tells_position_first):
                    await asyncio.sleep(shard.sorts_s)
                if keys and shard.is_reopened and self.places[name] < len(shard.binlog):
                    shard.is_reopened = False
                    for other in self._continued(name, shard, keys):
                        yield other
                    return
                yield response
                keys = [
                    key
                    for event in response.events
                    for each in event.vgtid.shard_gtids
                    for key in each.table_pks
                ]

    def _continued(
        self, name: str, shard: FakeShard, keys: Sequence[pb.TableLastPk]
    ) -> Iterator[pb.VStreamResponse]:
        # First the transactions that the stream lacks, then the present rows.
        while (at := self.places[name]) < len(shard.binlog):
            entry = shard.binlog[at]
            if isinstance(entry, pb.Journal):
                return
            self.places[name] += 1
            yield self.transaction(name, shard, entry, keys)
        yield from self._copy(name, shard, keys)

    def transaction(
        self,
        name: str,
        shard: FakeShard,
        changes: Sequence[tuple[int, int]],
        keys: Sequence[pb.TableLastPk] = (),
    ) -> pb.VStreamResponse:
        self._positions[name] = shard.gtid(self.places[name])
        events = [_event(pb.BEGIN, name)]
        changes = [each for each in changes if self._is_in(each[0])]
        if changes:
            is_altered = shard.altered is not None and self.places[name] > shard.altered
            events += self._description(name, 3 if is_altered else 2, is_unnamed=shard.is_unnamed)
            events += [self._change(name, *each, *((0,) if is_altered else ())) for each in changes]
            wrong = shard.unreadable.get(self.places[name])
            if wrong == "statement":
                events.append(_event(pb.INSERT, name))
            elif wrong == "values":
                events[-1].row_event.row_changes[0].data_columns.MergeFrom(pb.Bitmap(count=2, cols=b"\1"))
            if shard.is_altered_within:
                events += [*self._description(name, 3, is_unnamed=True), self._change(name, *changes[-1], 0)]
        return _response(*events, self._vgtid(name, *keys), _event(pb.COMMIT, name))

    def journal(self, name: str, shard: FakeShard, journal: pb.Journal) -> pb.VStreamResponse:
        self._positions[name] = shard.gtid(self.places[name])
        found = _event(pb.JOURNAL, name)
        found.journal.CopyFrom(journal)
        found.journal.local_position = shard.gtid(self.places[name] - 1)
        return _response(_event(pb.BEGIN, name), found, self._vgtid(name), _event(pb.COMMIT, name))

    def _copy(self, name: str, shard: FakeShard, keys: Sequence[pb.TableLastPk]) -> list[pb.VStreamResponse]:
        last = max((int(row.values) for key in keys for row in key.last_pk.rows), default=-(1 << 63))
        begun = self._vgtid(name, *keys)
        found = [_response(_event(pb.BEGIN, name), *self._description(name, time_s=0), begun)]
        if shard.lost_copies:
            shard.lost_copies -= 1
            self._described.clear()  # another tablet describes its tables again
            return found
        for key, counter in sorted(shard.rows.items()):
            if key > last and self._is_in(key):
                primary = pb.TableLastPk(table_name=TABLE, last_pk=_key(key))
                found.append(
                    _response(
                        _event(pb.BEGIN, name),
                        self._change(name, key, counter, time_s=0),
                        self._vgtid(name, primary),
                        _event(pb.COMMIT, name),
                    )
                )
        found.append(_response(_event(pb.BEGIN, name), self._vgtid(name), _event(pb.COMMIT, name)))
        if shard.has_view and self._is_of_all:
            found += self._copied_view(name, shard)
        done = pb.VEvent(type=pb.COPY_COMPLETED, keyspace=KEYSPACE, shard=name)
        return [*found, _response(done, pb.VEvent(type=pb.COPY_COMPLETED))]

    def _copied_view(self, name: str, shard: FakeShard) -> Iterator[pb.VStreamResponse]:
        (described,) = self._description(name, 2, time_s=0, is_again=True)
        described.field_event.table_name = VIEW
        for column in described.field_event.fields:
            column.flags = 0
        yield _response(_event(pb.BEGIN, name), described, self._vgtid(name))
        for key, counter in sorted(shard.rows.items()):
            change = self._change(name, key, counter, time_s=0)
            change.row_event.table_name = VIEW
            yield _response(change, self._vgtid(name), _event(pb.COMMIT, name))

    def _description(
        self,
        name: str,
        columns: int = 2,
        *,
        is_unnamed: bool = False,
        is_again: bool = False,
        time_s: int | None = None,
    ) -> list[pb.VEvent]:
        if (name, columns) in self._described and not is_again:
            return []
        self._described.add((name, columns))
        described = pb.FieldEvent(table_name=self._table, keyspace=KEYSPACE, shard=name)
        for number, (column, flags) in enumerate(_COLUMNS[:columns], 1):
            known = f"@{number}" if is_unnamed else column
            described.fields.add(name=known, type=_BIGINT, column_type="bigint", flags=flags, charset=63)
        now_s = _now_s() if time_s is None else time_s
        return [pb.VEvent(type=pb.FIELD, timestamp=now_s, field_event=described)]

    def _change(self, name: str, *values: int, time_s: int | None = None) -> pb.VEvent:
        change = pb.RowChange(after=_row([str(value).encode() for value in values]))
        found = pb.RowEvent(table_name=self._table, keyspace=KEYSPACE, shard=name, row_changes=[change])
        return pb.VEvent(type=pb.ROW, timestamp=_now_s() if time_s is None else time_s, row_event=found)

    def _vgtid(self, name: str, *keys: pb.TableLastPk) -> pb.VEvent:
        found = _event(pb.VGTID, name)
        for shard, gtid in self._positions.items():
            position = found.vgtid.shard_gtids.add(keyspace=KEYSPACE, shard=shard, gtid=gtid)
            if shard == name:
                position.table_pks.extend(keys)
        return found


def _condition(rules: Sequence[pb.Rule]) -> Callable[[int], bool]:
    """Return whether a key is in the range of a rule, if it has one."""
    bounds = re.findall(r"`id` (>=|<) (-?\d+)", rules[0].filter) if rules else []
    return lambda key: all(key >= int(value) if sign == ">=" else key < int(value) for sign, value in bounds)


def _event(kind: pb.EventType, shard: str) -> pb.VEvent:
    return pb.VEvent(
        type=kind, timestamp=_now_s(), current_time=time.time_ns(), keyspace=KEYSPACE, shard=shard
    )


def _response(*events: pb.VEvent) -> pb.VStreamResponse:
    return pb.VStreamResponse(events=events)


def _refused(code: int = 14, words: str = "no healthy tablet available") -> pb.ExecuteResponse:
    found = pb.ExecuteResponse()
    found.error.code, found.error.message = code, words
    return found


def _row(values: Sequence[bytes]) -> pb.Row:
    return pb.Row(lengths=[len(value) for value in values], values=b"".join(values))


def _key(key: int) -> pb.QueryResult:
    return pb.QueryResult(fields=[pb.Field(name="id", type=_BIGINT)], rows=[_row([str(key).encode()])])


def _server(number: int) -> str:
    return f"{number:08x}-0000-11eb-b894-04ed332e05c2"


def _now_s() -> int:
    return int(time.time())
