"""`make torture`: everything at once; at each cut the mirror must equal the source.

    python -m tests.support.torture.chaos [--minutes 60] [--cut-s 90] [--lock-s 120] [--seed N] [--version 18]

Between two cuts all actors of `disturbances` work while the pipeline is killed with -9 again and
again, at random moments and at failpoints. At a cut the actors end, the pipeline catches up, and every
table of the mirror is compared with what SELECT gives, masked values with their hashes. A masked value in
plain text in any file of a sink is a problem, and so is a process that ends by itself. Exit status 1 if
anything was found; `--without rename_masked_column` leaves an act out, to narrow a finding down.
"""

# ruff: noqa: T201 (it talks to a person)

from __future__ import annotations

import hashlib
import hmac
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tailrace.changelog.reader import LogReader
from tailrace.model import parse_lsn
from tailrace_servers.install import find_install
from tailrace_servers.postgres import EmbeddedPostgres
from tests.support.differential import lake, source
from tests.support.differential.tables import SERIAL, Column, Table
from tests.support.postgres import SETTINGS, Database
from tests.support.torture import disturbances
from tests.support.torture.campaign import arguments
from tests.support.torture.harness import POINTS, Life
from tests.support.wait import wait_until

NAME = "chaos"
SALT = "a salt of this test"
SINKS: dict[str, dict[str, Any]] = {
    "mirror": {"type": "delta", "mode": "mirror"},
    "parquet": {"type": "parquet"},
    "jsonl": {"type": "jsonl"},
}
#: How long a process lives at most before it is killed, in seconds.
LIFE_S_MAX = 30.0
WAIT_S = 240.0


class Chaos:
    """One database, one pipeline, and all that happens to them. Not thread-safe.

    :param root: an empty directory.
    :param lock_s_max: how long locks are held at most.
    """

    def __init__(self, root: Path, database: Database, seed: int, *, lock_s_max: float) -> None:
        self.root = root
        self.database = database
        self.rng = random.Random(f"chaos {seed}")
        self.kills = 0
        self._seed = seed
        self._cuts = 0
        self._lock_s_max = lock_s_max
        self._file = root / "pipeline.yaml"
        self._log = root / "log"
        self._life: Life | None = None
        disturbances.create(database.dsn, self.rng)
        self._file.write_text(yaml.safe_dump(self._sections()))

    def close(self) -> None:
        """Kill the processes that still live."""
        if self._life is not None:
            self._life.close()

    def run_until_cut(self, seconds: float) -> list[str]:
        """Let all actors work for so long while the pipeline is killed; then return the problems.

        :raises AssertionError: if a process ended by itself, or does not catch up.
        """
        if not self._cuts:
            self._begin()
        self._cuts += 1
        resting = threading.Event()
        around = disturbances.Surroundings(self.database.dsn, self._lock_s_max, resting, self._request)
        with ThreadPoolExecutor(len(disturbances.ACTORS)) as pool:
            try:
                actors = [
                    pool.submit(disturbances.act_on, name, f"{self._seed} {self._cuts}", around)
                    for name in disturbances.ACTORS
                ]
                self._kill_until(time.monotonic() + seconds, actors)
            finally:
                resting.set()
        for actor in actors:
            actor.result()
        disturbances.touch(self.database.dsn, self.rng)
        self._catch_up()
        return [*self._differences(), *self._plain_texts()]

    def end(self) -> None:
        """Send SIGTERM and require a good exit status."""
        assert self._life is not None
        assert self._life.end() == 0, self._life.last_words()

    # ------------------------------------------------------------------ processes

    def _begin(self) -> None:
        """Run until the log knows the tables: a rule that names a column can follow it from then on."""
        life = self._start()
        wait_until(lambda: life.is_over or self._status().get("state") == "streaming", WAIT_S, "the stream")
        assert not life.is_over, life.last_words()

    def _kill_until(self, deadline: float, actors: list[Future[None]]) -> None:
        """Start one process after another and kill each."""
        while time.monotonic() < deadline:
            life = self._life
            if life is None or life.is_over:
                armed = self.rng.random() < 0.5
                point = f"{self.rng.choice(sorted(POINTS))}=kill@{self.rng.choice((1, 2, 5))}"
                life = self._start(point if armed else "")
            killed_at = min(deadline, time.monotonic() + self.rng.uniform(1, LIFE_S_MAX))
            while time.monotonic() < killed_at and not life.is_over:
                time.sleep(0.05)
                assert not any(actor.done() for actor in actors), [actor.exception(0) for actor in actors]
            life.close()
            assert life.wait() == -signal.SIGKILL, life.last_words()
            self.kills += 1

    def _start(self, failpoints: str = "") -> Life:
        self._life = Life(
            [sys.executable, "-m", "tailrace", "run", str(self._file)],
            {**os.environ, "PYTHONUNBUFFERED": "1", "TAILRACE_FAILPOINTS": failpoints, "CHAOS_SALT": SALT},
            self.root / "output",
        )
        return self._life

    def _catch_up(self) -> None:
        """Run until everything committed is in every sink and no snapshot is under way."""
        life = self._start() if self._life is None or self._life.is_over else self._life
        self.database.query("select pg_switch_wal()")
        lsn = parse_lsn(self.database.query("select pg_current_wal_flush_lsn()::text")[0][0])
        try:
            wait_until(lambda: life.is_over or self._is_in_log(lsn), WAIT_S, "the log")
            wait_until(lambda: life.is_over or self._is_in_sinks(), WAIT_S, "the sinks")
        except AssertionError as error:
            error.add_note(f"{self._status()}\n{life.last_words()}")
            raise
        assert not life.is_over, life.last_words()

    def _is_in_log(self, lsn: int) -> bool:
        query = "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s"
        found = self.database.query(query, [f"tailrace_{NAME}"])
        return bool(found) and parse_lsn(found[0][0] or "0/0") >= lsn and not self._snapshots_left()

    def _is_in_sinks(self) -> bool:
        with LogReader.open(self._log, "0") as reader:
            end = reader.end().offset
        status = self._status()
        assert not [sink for sink in status.get("sinks", []) if sink["state"] == "failed"], status["sinks"]
        return bool(status) and all((sink["position"] or 0) >= end for sink in status["sinks"])

    def _status(self) -> dict[str, Any]:
        assert self._life is not None
        try:
            status: dict[str, Any] = json.loads((self._log / "status.json").read_text("utf-8"))
        except FileNotFoundError:
            return {}
        return status if status["pid"] == self._life.pid else {}

    # ------------------------------------------------------------------ requested snapshots

    def _request(self, table: str, where: str | None) -> None:
        if not (self._log / "identity.json").exists():
            return  # no log yet
        condition = [] if where is None else ["--where", where]
        asked = self._command("snapshot", str(self._file), "--table", table, *condition)
        assert asked.returncode == 0, asked.stderr

    def _snapshots_left(self) -> bool:
        """Whether a requested snapshot waits or is being taken; a failed one is a problem."""
        shown = self._command("snapshot", str(self._file), "--list", "--json")
        assert shown.returncode == 0, shown.stderr
        states = {each["state"] for each in json.loads(shown.stdout)["snapshots"]}
        assert "failed" not in states, shown.stdout
        return bool(states & {"waiting", "open"})

    def _command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tailrace", *words], capture_output=True, text=True, check=False,
            timeout=WAIT_S, env={**os.environ, "CHAOS_SALT": SALT},
        )  # fmt: skip

    # ------------------------------------------------------------------ comparison

    def _differences(self) -> list[str]:
        with psycopg.connect(self.database.dsn) as connection:
            masked = disturbances.masked_name(connection)
            tables = [self._table(connection, name) for name in disturbances.TABLES]
        found = []
        for table, rows in zip(tables, source.rows_of(self.database.dsn, tables).values(), strict=True):
            wanted = rows
            if table.name == disturbances.MASKED_TABLE:
                wanted = [{**row, masked: _hashed(row[masked])} for row in rows]
            found += lake.mirror_problems(self.root / "mirror", f"public.{table.name}", wanted, table.names)
        return found

    @staticmethod
    def _table(connection: psycopg.Connection[Any], name: str) -> Table:
        rows = connection.execute(
            "select attrelid::bigint, attname from pg_attribute "
            "where attrelid = %s::regclass and attnum > 0 and not attisdropped order by attnum",
            [name],
        ).fetchall()
        columns = tuple(Column(column, SERIAL) for _, column in rows)
        return Table(rows[0][0], "public", name, columns, ("uid",))

    def _plain_texts(self) -> list[str]:
        """Return the sinks' files that hold a masked value in plain text."""
        found = []
        for kind in SINKS:
            files = [file for file in (self.root / kind).rglob("*") if file.is_file()]
            if open_ones := [file.name for file in files if _has_plain_text(file)]:
                found.append(
                    f"{kind}: masked values in plain text in {len(open_ones)} files: {open_ones[:3]}"
                )
        return found

    def _sections(self) -> dict[str, Any]:
        return {
            "name": NAME,
            "source": {
                "type": "postgresql", "dsn": self.database.dsn, "tables": ["public.*"],
                "masks": [
                    {"columns": ["public.people.mail"], "method": "hash", "salt": "${env:CHAOS_SALT}"},
                ],
                "snapshot_chunk_rows": 40, "reconnect_delay_s": 0.1, "status_interval_s": 1,
            },
            "log": {"path": str(self._log), "segment_bytes": 64 * 1024},
            "sinks": [
                {**SINKS[kind], "name": kind, "path": str(self.root / kind), "interval_ms": 50}
                for kind in SINKS
            ],
            "spark": {"master": "local[2]", "conf": {"spark.ui.enabled": "false"}},
        }  # fmt: skip


def _hashed(text: str | None) -> str | None:
    return None if text is None else hmac.new(SALT.encode(), text.encode(), hashlib.sha256).hexdigest()


def _has_plain_text(file: Path) -> bool:
    if file.suffix != ".parquet":
        return disturbances.PLAIN.encode() in file.read_bytes()
    try:
        content = pq.ParquetFile(file).read()
    except (pa.ArrowInvalid, FileNotFoundError):
        return False  # cut short by a kill, or removed meanwhile
    texts = [content[at] for at, each in enumerate(content.schema) if pa.types.is_string(each.type)]
    return any(disturbances.PLAIN in (text or "") for column in texts for text in column.to_pylist())


def main() -> int:
    """Run what the command line asks for; return the exit status."""
    parser = arguments(__doc__ or "", 0)
    parser.add_argument("--minutes", type=float, default=60, help="how long (default 60)")
    parser.add_argument("--cut-s", type=float, default=90, help="seconds from cut to cut (default 90)")
    parser.add_argument("--lock-s", type=float, default=120, help="how long locks are held at most")
    parser.add_argument("--without", action="append", default=[], help="an act; may be repeated")
    chosen = parser.parse_args()
    disturbances.leave_out(chosen.without)
    print(f"seed {chosen.seed}", flush=True)
    root = Path(tempfile.mkdtemp(prefix="chaos-"))
    deadline = time.monotonic() + chosen.minutes * 60
    with EmbeddedPostgres(find_install(chosen.version), settings=SETTINGS) as server:
        server.create_database(NAME)
        chaos = Chaos(root, Database(server, NAME), chosen.seed, lock_s_max=chosen.lock_s)
        try:
            while time.monotonic() < deadline:
                problems = chaos.run_until_cut(chosen.cut_s)
                if problems:
                    print("\n".join(problems), f"\nseed {chosen.seed}; what was found is kept in {root}")
                    return 1
                print("cut: the mirror is the source", flush=True)
            chaos.end()
        finally:
            chaos.close()
    print(f"{chaos.kills} kills; the mirror was the source at each cut")
    return 0


if __name__ == "__main__":
    sys.exit(main())
