"""One engine, databases of two servers: faults hit one of them, and the others go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml

from tailrace.changelog.directory import LogDirectory
from tailrace.config import ColumnPolicy
from tailrace.decode.column_policy import TablePolicy
from tailrace.pipeline.log.inspection import Selection, json_lines
from tailrace_servers.postgres import EmbeddedPostgres
from tests.support.postgres import Database, Servers
from tests.support.proxy import Proxy
from tests.support.torture import ledger, validator
from tests.support.torture.harness import SINKS, Life, Round
from tests.support.torture.sinks import parse_json
from tests.support.wait import wait_until

#: Engines with Spark start slowly on a busy machine.
LONG_S = 120.0
#: Four databases with several writers each on few cores: what matters is which go on, not how fast.
PAUSE_S = 0.1


@dataclass
class Fleet:
    """Databases with a workload each, and one pipeline over all of them.

    `first` runs the commands; its own database is the first of `databases`.
    """

    first: Round
    databases: dict[str, Database]
    ports: dict[str, int] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        others = list(self.databases.values())[1:]
        for database in others:
            ledger.create(database.dsn)
        self.workloads = dict(
            zip(
                self.databases,
                [
                    self.first.workload,
                    *(ledger.Workload(database.dsn, 7, pause_s=PAUSE_S) for database in others),
                ],
                strict=True,
            )
        )
        self.write_file(*self.first.sinks)

    def write_file(self, *sinks: str) -> None:
        """Write the pipeline's file, with these sinks."""
        document = {
            "name": "shop",
            "sources": [
                {
                    "name": name, "host": "127.0.0.1", "user": "postgres", "dbname": database.name,
                    "port": self.ports.get(name, database.port), "status_interval_s": 1,
                    "reconnect_delay_s": 0.1, "reconnect_delay_s_max": 1,
                }
                for name, database in self.databases.items()
            ],
            "tasks_max": 2,
            "log": {"path": str(self.first.log), "segment_bytes": 64 * 1024},
            "sinks": [
                {**SINKS[kind], "name": kind, "path": str(self.first.root / kind), "retry_attempts_max": 2}
                for kind in sinks
            ],
            "spark": {"master": "local[2]", "conf": {"spark.ui.enabled": "false"}},
            **self.settings,
        }  # fmt: skip
        self.first.file.write_text(yaml.safe_dump(document, sort_keys=False))

    @contextmanager
    def at_work(self, *names: str) -> Iterator[None]:
        """Let the writers of these databases, or of all, work while the context is open."""
        with ExitStack() as stack:
            for name in names or self.databases:
                self.workloads[name].start()
                stack.callback(self.workloads[name].stop)
            yield

    def status(self) -> dict[str, Any]:
        return json.loads(self.first.command("status", str(self.first.file), "--json").stdout)

    def shown(self) -> dict[str, Any]:
        """What the engine shows, read in this process."""
        file = self.first.log / "status.json"
        return json.loads(file.read_text()) if file.exists() else {"tasks": [], "sinks": []}

    def are(self, state: str, names: set[str]) -> bool:
        states = {task["name"]: task["state"] for task in self.shown()["tasks"]}
        return all(states.get(name) == state for name in names)

    def all_stream(self) -> bool:
        return self.are("streaming", set(self.databases))

    def grow(self, names: set[str], life: Life) -> None:
        """Wait until more of each of these is in the sink, or in the log if there is no sink."""

        def reached() -> dict[str, int]:
            found = self.shown()
            ends = {task["name"]: task["log_end"] or 0 for task in found["tasks"]}
            return ends | {sink["source"]: sink["position"] or 0 for sink in found["sinks"]}

        before = reached()

        def grown() -> bool:
            assert not life.is_over, life.last_words()
            now = reached()
            return all(now.get(name, 0) > before.get(name, 0) for name in names)

        wait_until(grown, LONG_S, f"{names} to grow from {before}")

    def active_slots(self) -> list[str]:
        """The slots in use, on all servers."""
        servers = {database.port: database.server for database in self.databases.values()}
        asked = "select slot_name from pg_replication_slots where active and slot_name like 'tailrace_shop_%'"
        return [row[0] for server in servers.values() for row in server.query(asked)]

    def judge(self) -> list[str]:
        """Return the problems of all logs and sinks, after a last run up to the end."""
        self.write_file(*self.first.sinks)
        life = self.first.live()
        assert life.wait() == 0, life.last_words()
        found = []
        for name, database in self.databases.items():
            rows = ledger.source_rows(database.dsn)
            # In this process: four more interpreters would show nothing more.
            log = LogDirectory.open(self.first.log / name)
            lines = json_lines(log, "0", Selection(), TablePolicy.of(ColumnPolicy()))
            changes = [parse_json(line, "log") for line in lines]
            found += [f"log of {name}: {each}" for each in validator.history_problems(changes, rows)]
            for kind in self.first.sinks:
                path = self.first.root / kind / name
                found += [
                    f"{kind} of {name}: {each}" for each in validator.problems(kind, path, database.dsn)
                ]
        return found


@pytest.fixture
def databases(own_pg: EmbeddedPostgres, servers: Servers) -> Iterator[dict[str, Database]]:
    """Two on a server that may be killed, two on another version that goes on; equal tables."""
    steady = servers.get(16)
    found = {}
    for name, server in {"north": own_pg, "east": steady, "south": own_pg, "west": steady}.items():
        server.create_database(f"several_{name}")
        found[name] = Database(server, f"several_{name}")
    yield found
    own_pg.start()
    for database in found.values():
        database.drop()


@pytest.fixture
def make_fleet(databases: dict[str, Database], make_round: Callable[..., Round]) -> Callable[..., Fleet]:
    def make(*sinks: str, **options: Any) -> Fleet:
        return Fleet(
            make_round(next(iter(databases.values())), *sinks, pause_s=PAUSE_S), databases, **options
        )

    return make


@pytest.mark.ci
@pytest.mark.timeout(900)
def test_four_databases_of_two_servers_survive_kills_and_a_restart(
    make_fleet: Callable[..., Fleet], own_pg: EmbeddedPostgres
) -> None:
    fleet = make_fleet("jsonl")
    fleet.write_file("jsonl")
    names = set(fleet.databases)
    with fleet.at_work():
        # The engine is killed while all databases are written to.
        life = fleet.first.live(until_caught_up=False)
        fleet.grow(names, life)
        life.kill()
        # It is started again, and one of the servers is killed: the other server's sources go on.
        # Without sinks, as Spark starts slowly: they read the logs in the last run.
        fleet.write_file()
        life = fleet.first.live(until_caught_up=False)
        fleet.grow(names, life)
        own_pg.kill()
        wait_until(lambda: fleet.are("connecting", {"north", "south"}), LONG_S, "the loss to be seen")
        fleet.grow({"east", "west"}, life)
        told = fleet.status()
        tasks = {task["name"]: task for task in told["tasks"]}
        assert tasks["north"]["error"]["kind"].startswith("source_")
        assert {name: task["engine_task"] for name, task in tasks.items()} == {
            "north": 0, "east": 1, "south": 0, "west": 1,
        }  # fmt: skip
        assert (told["state"], told["error"], tasks["east"]["error"]) == ("starting", None, None)
        own_pg.start()
        wait_until(fleet.all_stream, LONG_S, "all to stream again")
        fleet.grow(names, life)
        # One signal stops all of them.
        assert life.end() == 0, life.last_words()
    assert fleet.active_slots() == []
    assert fleet.judge() == []
    found = fleet.status()
    assert (found["state"], {task["state"] for task in found["tasks"]}) == ("stopped", {"stopped"})
    assert [(sink["source"], sink["name"], sink["lag_bytes"]) for sink in found["sinks"]] == [
        (name, "jsonl", 0) for name in fleet.databases
    ]
    # A replay has one source.
    replay = ("replay", str(fleet.first.file), "--sink", "jsonl")
    assert "name one of them with --source: north, east" in fleet.first.command(*replay).stderr
    replayed = fleet.first.command(*replay, "--source", "east")
    assert (replayed.returncode, "already holds everything" in replayed.stdout) == (0, True)


def test_a_source_that_cannot_go_on_is_reported_and_the_others_go_on(
    make_fleet: Callable[..., Fleet],
) -> None:
    fleet = make_fleet()
    life = fleet.first.live(until_caught_up=False)
    wait_until(fleet.all_stream, LONG_S, "all to stream")
    fleet.databases["east"].drop()
    others = {"north", "south", "west"}
    wait_until(lambda: fleet.are("failed", {"east"}), LONG_S, "the failure")
    with fleet.at_work(*others):
        fleet.grow(others, life)
    told = fleet.status()
    assert (told["state"], told["error"]["context"]["source"]) == ("streaming", "east")
    east = next(task for task in told["tasks"] if task["name"] == "east")
    assert (east["state"], east["error"]["kind"]) == ("failed", told["error"]["kind"])
    # The run ends with the status of a failure, however it was ended.
    assert life.end() == 1, life.last_words()
    assert "source=east" in life.last_words()
    assert "Traceback" not in life.last_words()
    found = fleet.status()
    states = {task["name"]: task["state"] for task in found["tasks"]}
    assert states == {"north": "stopped", "east": "failed", "south": "stopped", "west": "stopped"}
    assert (found["state"], found["error"]["context"]["source"]) == ("failed", "east")
    # The others ended normally: their slots are free, and what they received is kept.
    assert fleet.active_slots() == []
    ls = json.loads(fleet.first.command("log", "ls", str(fleet.first.log), "--json").stdout)
    assert [log["name"] for log in ls["logs"]] == sorted(fleet.databases)
    verified = fleet.first.command("log", "verify", str(fleet.first.file))
    assert (verified.returncode, verified.stdout.count("sound: ")) == (0, 4)
    shown = fleet.first.command("log", "show", str(fleet.first.log))
    assert shown.returncode == 2
    assert "--source: east, north, south, west" in shown.stderr


def test_a_server_that_is_down_at_the_start_is_captured_once_it_is_up(
    make_fleet: Callable[..., Fleet], proxy: Callable[[int], Proxy], own_pg: EmbeddedPostgres
) -> None:
    gate = proxy(own_pg.port)
    gate.stop()
    fleet = make_fleet(ports={"north": gate.port})
    check = fleet.first.command("check", str(fleet.first.file), "--json")
    assert check.returncode == 1
    problems = json.loads(check.stdout)["problems"]
    assert [(each["kind"], each["source"]) for each in problems] == [("source_unreachable", "north")]
    with fleet.at_work():
        life = fleet.first.live()  # until all have caught up
        wait_until(lambda: fleet.are("connecting", {"north"}), LONG_S, "the first attempt")
        others = {"east", "south", "west"}
        # They finish earlier; the engine waits for the missing one.
        wait_until(lambda: fleet.are("stopped", others), LONG_S, "the others to be done")
        assert not life.is_over, life.last_words()
        assert fleet.status()["state"] == "starting"
        # A second engine on the same logs is refused, although one log does not exist yet.
        refused = fleet.first.command("run", str(fleet.first.file))
        assert (refused.returncode, "log_locked" in refused.stderr) == (1, True)
        gate.start()
        assert life.wait() == 0, life.last_words()
    assert fleet.judge() == []
