"""Random runs of engines on a real server: nothing is lost, and no resource leaks, here or on the server."""

from __future__ import annotations

import itertools
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from tailrace import Callbacks, Engine, RetriableError, StopEngine, TailraceError
from tests.support.engine_runs import SEEDS, Leaks
from tests.support.postgres import Database
from tests.support.wait import wait_until

LATE_S = 120.0


class Server:
    """A table that gets rows, and the server's view of its clients."""

    def __init__(self, pg: Database, folder: Path) -> None:
        self.pg = pg
        self.rows = 0
        self.settings = {
            "name": "lives",
            "source": {
                "type": "postgresql", "dsn": pg.dsn, "tables": ["public.*"], "slot": f"s_{pg.name}",
                "reconnect_delay_s": 0.05, "reconnect_delay_s_max": 0.1,
            },
            "log": {"path": str(folder / "log")},
        }  # fmt: skip
        pg.execute("create table orders(id bigserial primary key)")

    def insert(self, count: int) -> None:
        self.pg.execute("insert into orders select from generate_series(1, %s)", [count])
        self.rows += count

    def cut(self) -> None:
        """Terminate all connections to the database."""
        self.pg.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = %s and pid <> "
            "pg_backend_pid()",
            [self.pg.name],
        )

    def check(self) -> None:
        """Fail if a connection is left, or a slot other than the engine's, or if that is in use."""
        asked = "select count(*) from pg_stat_activity where datname = %s and pid <> pg_backend_pid()"
        wait_until(lambda: self.pg.query(asked, [self.pg.name]) == [(0,)], LATE_S, "connections to end")
        slots = self.pg.query(
            "select slot_name, active from pg_replication_slots where database = %s", [self.pg.name]
        )
        assert slots in ([], [(f"s_{self.pg.name}", False)])


def lives(server: Server, count: int, seed: int) -> None:
    """Run so many engines, each ended in one way or another, then one without faults that takes the rest."""
    rng, done, leaks = random.Random(seed), set[int](), Leaks()
    for _ in range(count):
        server.insert(rng.randint(0, 20))
        _live(server, rng, done)
    server.check()
    Engine(
        server.settings,
        settings={"until_caught_up": True},
        on_record=lambda record: done.add(record.after["id"]),
    ).run()
    assert done == set(range(1, server.rows + 1))
    server.check()
    leaks.check()


def _live(server: Server, rng: random.Random, done: set[int]) -> None:
    calls, at = itertools.count(1), rng.randint(1, 15)
    what = rng.choice(
        [ValueError(), RetriableError(), StopEngine(), KeyboardInterrupt(), "close", "cut", None]
    )
    timer = threading.Timer(rng.choice([0.0, 0.01, 0.3, 1.0]), lambda: engine.close())  # noqa: PLW0108 - made below

    def handle(record: Any) -> None:
        if next(calls) == at:
            if isinstance(what, BaseException):
                if isinstance(what, StopEngine):
                    done.add(record.after["id"])
                raise what
            if what is not None:
                engine.close() if what == "close" else server.cut()
        done.add(record.after["id"])

    started = rng.choice(["connector_started", "task_started", "polling_started"])
    callbacks = Callbacks(**{started: lambda *_: timer.start()})
    engine = Engine(
        server.settings,
        on_record=handle,
        callbacks=callbacks,
        options={
            "errors_retry_delay_initial_ms": 1,
            "errors_retry_delay_max_ms": 5,
            "on_task_failure": rng.choice(["stop", "restart", "isolate"]),
            "record_processing": {
                "order": rng.choice(["ordered", "unordered", "key"]),
                "shutdown_timeout_ms": rng.choice([0, 1000]),
            },
            "offset_commit": {"policy": rng.choice(["always", "periodic", "transaction"])},
        },
    )
    try:
        engine.run()
    except TailraceError as error:
        assert error is engine.error  # noqa: PT017 - any failure is fine, as long as it is told
    finally:
        timer.cancel()
        if timer.ident is not None:
            timer.join(LATE_S)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_runs_leak_no_connection_slot_thread_or_file(pg: Database, tmp_path: Path, seed: int) -> None:
    lives(Server(pg, tmp_path), 10, seed)


@pytest.mark.torture
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_thousand_random_runs_leak_no_connection_slot_thread_or_file(
    pg: Database, tmp_path: Path, seed: int
) -> None:
    lives(Server(pg, tmp_path), 1000, seed)
