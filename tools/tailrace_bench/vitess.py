"""A backlog of a real keyspace to the fsynced log, against a client that counts bytes, and as JSON to a
handler, against Debezium's engine; and a thousand idle shards.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import structlog

from tailrace.changelog.format import BlockHeader
from tailrace.changelog.writer import LogListener, LogWriter, Tail
from tailrace.config.sections import LogConfig
from tailrace.config.source.vitess import VitessSource
from tailrace.errors import Kind, TailraceError
from tailrace.protocol.frames import Bytes
from tailrace.sources.vitess.connection import vstream_pb2 as pb
from tailrace.sources.vitess.connection.vtgate import VSTREAM, Vtgate
from tailrace.sources.vitess.resharding.gtid_sets import GtidSet
from tailrace.sources.vitess.streaming.capture_task import VitessCapture
from tailrace.sources.vitess.streaming.stream_requests import table_rules
from tailrace_bench import vitess_peer
from tailrace_bench.support.idle_vtgate import OPEN_STREAMS
from tailrace_bench.support.process import answer_of
from tailrace_bench.support.report import Result, machine, median
from tailrace_servers.vitess import EmbeddedVitess, find_vitess

log = structlog.get_logger(__name__)

ROWS = 200_000
ROWS_A_TRANSACTION = 500
#: Divisor of the number of rows for transactions of one row.
SINGLE = 10
#: Number of turns: passes take a second or less, so their times vary much.
TURNS = 7
ENGINE_TURNS = 3
SHARDS = 1_000
#: Duration of the measurement of a thousand shards, in seconds.
WATCHED_S = 30.0
#: Timeout of a pass over the backlog, and of other waits, in seconds.
DEADLINE_S = 120.0
_WATCH_S = 300.0
_POLL_S = 0.02
#: Interval of logging the progress of loading, in seconds.
_SHOWN_S = 10.0
#: Share of the first pass's bytes that later passes count without parsing. Each position in the stream names
#: all shards, so their order changes the sum slightly: the rest is parsed to find the end.
_UNPARSED = 0.98

_VSCHEMA = {
    "sharded": True,
    "vindexes": {"h": {"type": "hash"}},
    "tables": {name: {"column_vindexes": [{"column": "id", "name": "h"}]} for name in ("orders", "single")},
}
_TABLE = "create table {} (id bigint primary key, what varchar(64), counter int, at timestamp(6) null)"


def measure(rows: int | None = None) -> Result:
    """Receive a backlog of `rows` rows with both, alternating; in transactions of 500 rows, then of one.

    Then pass it through both engines, unless the peer is missing (`make bench-vitess` fetches it).
    """
    rows = max(ROWS_A_TRANSACTION, rows or ROWS)
    schema = [_TABLE.format(name) for name in ("orders", "single")]
    with (
        EmbeddedVitess(find_vitess(), vschema=_VSCHEMA, schema=schema) as cluster,
        tempfile.TemporaryDirectory(prefix="tailrace-bench-") as name,
    ):
        backlog = _Backlog(cluster, Path(name) / "large", "orders", rows, ROWS_A_TRANSACTION)
        large = backlog.compared()
        log.info("transactions of many rows are received", **large)
        small = _Backlog(cluster, Path(name) / "small", "single", rows // SINGLE, 1).compared()
        log.info("transactions of one row are received", **small)
        engines = backlog.through_engines()
    idle = _thousand()
    return Result(
        name="vitess",
        value=large["rows_s"],
        unit="rows/s",
        ratio=large["ratio"],
        reference="a client in Python that counts bytes",
        limit="vtgate, vttablet and MySQL, which have the same cores",
        setup=machine()
        | {"rows": rows, "shards": 2, "rows_a_transaction": ROWS_A_TRANSACTION, "turns": TURNS},
        details={
            "single_row_ratio": round(small["ratio"], 2),
            "single_row_transactions_s": round(small["rows_s"]),
            "client_rows_s": round(large["client_rows_s"]),
            "two_tasks_to_one": round(large["two_tasks_to_one"], 2),
            "single_row_two_tasks_to_one": round(small["two_tasks_to_one"], 2),
            **engines,
            f"shards_{SHARDS}": idle,
        },
    )


class _Backlog:
    """The backlog of one table in two shards, from its first row on."""

    def __init__(self, cluster: EmbeddedVitess, at: Path, table: str, rows: int, each: int) -> None:
        self._cluster, self._at, self._table, self._rows, self._each = cluster, at, table, rows, each
        self._document = {
            "type": "vitess",
            "hosts": [cluster.address],
            "keyspace": cluster.keyspace,
            "snapshot": "never",
            "tables": [f"{cluster.keyspace}.{table}"],
        }
        self._source = VitessSource.model_validate(self._document)
        self._before: dict[str, str] = {}

    def compared(self) -> dict[str, float]:
        """Return the rates of both, the median of their ratios, and the ratio of two of our tasks to one."""
        before = self._before = self._positions()
        with _captured(self._source, self._at) as capture:
            begun_us = time.time_ns() // 1000
            _wait(lambda: capture.caught_up(begun_us), "the start of a capture")
        self._load()
        wanted = self._positions()
        expected = self._counted(before, wanted, 0)[0]
        log.info("the backlog is there", table=self._table, rows=self._rows, bytes=expected)
        ours, theirs, two = [], [], []
        for turn in range(TURNS):
            theirs.append(self._counted(before, wanted, int(expected * _UNPARSED))[1])
            ours.append(self._ours(f"one-{turn}", 1))
            two.append(self._ours(f"two-{turn}", 2))
            log.info("a turn", number=turn + 1, of=TURNS, ours=round(self._rows / ours[-1]),
                     counting=round(self._rows / theirs[-1]))  # fmt: skip
        return {
            "rows_s": self._rows / median(ours),
            "client_rows_s": self._rows / median(theirs),
            "ratio": median([client / own for client, own in zip(theirs, ours, strict=True)]),
            "two_tasks_to_one": median([one / both for one, both in zip(ours, two, strict=True)]),
        }

    def through_engines(self) -> dict[str, Any]:
        """Pass the backlog through our engine and Debezium's to a handler, as JSON; return the details."""
        if not vitess_peer.is_here():
            log.warning("the peer is not installed: there is no peer_ratio", hint="make bench-vitess")
            return {}
        # Our engine takes a second or two, so one run is not enough; the peer takes ten.
        runs = [
            vitess_peer.hand_over(self._document, self._copy(f"engine-{turn}"), self._rows)
            for turn in range(ENGINE_TURNS)
        ]
        own = sorted(runs, key=lambda run: run.seconds)[ENGINE_TURNS // 2]
        log.info("the engine has processed it", seconds=[round(run.seconds, 1) for run in runs])
        cluster = self._cluster
        peer = vitess_peer.receive(
            cluster.address, cluster.keyspace, self._table, self._before, self._rows, self._at.parent
        )
        log.info("Debezium's engine has, too", seconds=round(peer.seconds_from_first, 1))
        return {
            "peer": f"Debezium {vitess_peer.VERSION}, as JSON",
            "peer_ratio": round(peer.seconds_from_first / own.seconds, 2),
            "json_rows_s": round(self._rows / own.seconds),
            "json_cpu_us_a_row": round(own.cpu_seconds / self._rows * 1e6, 2),
            "peer_json_rows_s": round(self._rows / peer.seconds_from_first),
            "peer_json_cpu_us_a_row": round(peer.cpu_seconds / self._rows * 1e6, 2),
        }

    def _load(self) -> None:
        what = "an order of some things, number"
        shown_s = time.monotonic()
        with self._cluster.connection() as connection, connection.cursor() as cursor:
            for first in range(0, self._rows, self._each):
                values = ", ".join(
                    f"({key}, '{what} {key:08}', {key % 1000}, '2024-01-01 10:00:00.123456')"
                    for key in range(first, min(first + self._each, self._rows))
                )
                cursor.execute(f"insert into {self._table} values {values}")
                if time.monotonic() > shown_s + _SHOWN_S:
                    shown_s = time.monotonic()
                    log.info("loading", table=self._table, rows=first + self._each, of=self._rows)

    def _positions(self) -> dict[str, str]:
        found = {}
        for shard in self._cluster.shards:
            target = f"{self._cluster.keyspace}/{shard}"
            ((gtid,),) = self._cluster.execute("select @@global.gtid_executed", target=target)
            found[shard] = f"MySQL56/{gtid}".replace("\n", "")
        return found

    def _counted(self, begin: dict[str, str], end: dict[str, str], unparsed: int) -> tuple[int, float]:
        """Count the bytes of all shards in one stream; return their number and the duration in seconds.

        :param unparsed: number of bytes that are only counted. Later ones are also parsed, to find the end.
        """
        request = pb.VStreamRequest(
            tablet_type=pb.PRIMARY,
            filter=pb.Filter(rules=table_rules(self._source)),
            flags=pb.VStreamFlags(exclude_keyspace_from_table_name=True),
        )
        for shard, gtid in begin.items():
            request.vgtid.shard_gtids.add(keyspace=self._cluster.keyspace, shard=shard, gtid=gtid)
        options = [("grpc.max_receive_message_length", 128 << 20)]
        sets = {shard: GtidSet.parse(gtid) for shard, gtid in end.items()}
        count, started = 0, time.perf_counter()
        with grpc.insecure_channel(self._cluster.address, options) as channel:
            method: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(VSTREAM)
            call = method(request.SerializeToString(), timeout=DEADLINE_S)
            try:
                for response in call:
                    count += len(response)
                    if count > unparsed and _reaches(response, sets):
                        call.cancel()
                        return count, time.perf_counter() - started
            except grpc.RpcError as error:
                words = f"count the bytes of a backlog: {count} came, and then {error}"
                raise TailraceError(Kind.INTERNAL, words) from None
        raise TailraceError(Kind.INTERNAL, f"count the bytes of a backlog: the stream ended after {count}")

    def _copy(self, name: str) -> Path:
        """Return the path of a copy of the log, which has the positions before the backlog."""
        at = self._at.with_name(f"{self._at.name}-{name}")
        shutil.copytree(self._at, at)
        return at

    def _ours(self, name: str, tasks: int) -> float:
        at = self._copy(name)
        source = self._source.model_copy(update={"tasks_max": tasks})
        durable = _Durable(self._rows)
        started = time.perf_counter()
        with _captured(source, at, durable):
            if not durable.is_there.wait(DEADLINE_S):
                raise TailraceError(Kind.INTERNAL, f"capture a backlog: not there within {DEADLINE_S:g} s")
            return time.perf_counter() - started


def _reaches(response: bytes, wanted: dict[str, GtidSet]) -> bool:
    for event in pb.VStreamResponse.FromString(response).events:
        for position in event.vgtid.shard_gtids:
            found = GtidSet.parse(position.gtid)
            if position.shard in wanted and found.contains(wanted[position.shard]):
                del wanted[position.shard]
    return not wanted


class _Durable:
    """The listener of a log, with an event that is set when `rows` rows are durable.

    Polling the progress 200 times a second took as much of the interpreter's time as the capture.
    """

    def __init__(self, rows: int) -> None:
        self._missing, self._end = rows, 0
        self.is_there = threading.Event()

    def opened(self, writer: LogWriter) -> None: ...
    def cut(self, log_offset: int) -> None: ...
    def closed(self) -> None: ...

    def appended(self, header: BlockHeader, _frames: Bytes, _schema: Mapping[str, bytes]) -> None:
        """Count the rows."""
        if self._missing > 0:
            self._missing -= header.rows
            self._end = header.log_offset + header.raw_size

    def durable(self, tail: Tail) -> None:
        """Set the event if all rows are before `tail`."""
        if self._missing <= 0 and tail.offset >= self._end:
            self.is_there.set()


@contextmanager
def _captured(source: VitessSource, at: Path, listener: LogListener | None = None) -> Iterator[VitessCapture]:
    capture = VitessCapture(source, at, LogConfig(path=at), name="bench", listener=listener)
    thread = threading.Thread(target=capture.run, daemon=True)
    thread.start()
    try:
        yield capture
    finally:
        capture.stop()
        thread.join(60)


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise TailraceError(Kind.INTERNAL, f"wait for {what}: {DEADLINE_S:g} s were not enough")
        time.sleep(_POLL_S)


# ---------------------------------------------------------------------- a thousand shards


def _thousand() -> dict[str, Any]:
    """Capture a thousand idle shards in a separate process: from nothing, then from their positions."""
    server = [sys.executable, "-m", "tailrace_bench.support.idle_vtgate", str(SHARDS)]
    with (
        tempfile.TemporaryDirectory(prefix="tailrace-bench-") as name,
        subprocess.Popen(server, stdout=subprocess.PIPE, text=True) as vtgate,
    ):
        try:
            assert vtgate.stdout is not None
            address = f"127.0.0.1:{int(vtgate.stdout.readline())}"
            found: dict[str, Any] = {}
            for _ in range(2):
                found = answer_of("tailrace_bench.vitess", address, Path(name) / "log", deadline_s=_WATCH_S)
                log.info("a thousand idle shards", **found)
            return found
        finally:
            vtgate.kill()


def _watch(address: str, at: Path) -> dict[str, Any]:
    source = VitessSource.model_validate(
        {"hosts": [address], "keyspace": "shop", "snapshot": "never", "heartbeat_interval_s": 5}
    )
    started = time.monotonic()
    with closing(Vtgate.connect(source)) as vtgate, _captured(source, at) as capture:

        def is_streamed() -> bool:
            health = capture.progress().health
            shards = {} if health is None else health.details["shards"]
            modes = [each["state"] for each in shards.values() if ":" in each["gtid"]]
            ((streams,),) = vtgate.query(OPEN_STREAMS, "count the streams")
            return modes.count("streaming") == SHARDS == int(streams or 0)

        _wait(is_streamed, "a thousand streams")
        start_s = time.monotonic() - started
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        threading.Event().wait(WATCHED_S)
        share = (time.process_time() - began_cpu_s) / (time.monotonic() - began_s)
        return {
            "start_s": round(start_s, 1),
            "percent_of_a_core": round(share * 100, 1),
            "rss_mb": _rss_mb(),
            "connections": _connections(),
        }


def _rss_mb() -> int:
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1_000_000


def _connections() -> int:
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(link.startswith("socket:") for link in links)


if __name__ == "__main__":
    json.dump(_watch(sys.argv[1], Path(sys.argv[2])), sys.stdout)
