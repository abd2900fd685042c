"""`tailrace.Engine` on a real server: nothing lost, nothing out of order, after any kill."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tailrace import Engine, RetriableError, StopEngine, TailraceError
from tailrace.config import EngineConfig
from tailrace.errors import Kind
from tailrace.pipeline.log.consumer import partition_of
from tailrace.pipeline.offsets.log_store import LogOffsetStore
from tests.support.postgres import Database
from tests.support.wait import wait_until

SCRIPT = Path(__file__).with_name("keeping_engine.py")
#: Deadline of stops that nothing delays.
OFTEN = {"offset_commit": {"policy": "always"}, "record_processing": {"shutdown_timeout_ms": 10_000}}


@pytest.fixture
def settings(pg: Database, tmp_path):
    pg.execute("create table orders(id bigserial primary key, what text)")
    pg.execute("create table lines(id bigserial primary key)")
    return {
        "name": "shop",
        "source": {"type": "postgresql", "dsn": pg.dsn, "tables": ["public.*"], "slot": f"s_{pg.name}"},
        "log": {"path": str(tmp_path / "log")},
        "engine": OFTEN,
    }


def insert(pg: Database, rows: int) -> None:
    pg.execute("insert into orders(what) select 'x' from generate_series(1, %s)", [rows])


class Writers:
    """Writes to both tables on two connections until stopped."""

    def __init__(self, pg: Database) -> None:
        self._pg, self._stop = pg, threading.Event()
        self._threads = [threading.Thread(target=self._write, args=(k,)) for k in range(2)]
        for thread in self._threads:
            thread.start()

    def _write(self, k: int) -> None:
        with self._pg.connect() as connection:
            while not self._stop.wait(0.002):
                connection.execute(
                    "with one as (insert into orders(what) select 'y' from generate_series(1, %s)) "
                    "insert into lines default values",
                    [1 + 40 * k],
                )

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def lines_of(path: Path) -> list[tuple[int, str, int]]:
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1].splitlines()
    return [(int(at), topic, int(number)) for at, topic, number in (line.split() for line in whole)]


@pytest.mark.timeout(600)
@pytest.mark.ci
def test_after_repeated_kills_nothing_is_lost_and_only_uncommitted_records_repeat(
    pg: Database, settings, tmp_path
) -> None:
    insert(pg, 3000)
    writers = Writers(pg)
    committed, lives = [], []
    pipeline = EngineConfig.model_validate(settings).pipelines[0]
    store = LogOffsetStore("shop", [pipeline])
    for life in range(4):
        file = tmp_path / f"life-{life}"
        if life == 3:
            writers.stop()
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(settings), str(file), str(int(life == 3))]
        )
        if life < 3:
            wait_until(lambda: len(lines_of(file)) > 1000, 90, "a thousand records")  # noqa: B023
            process.kill()
        assert process.wait(120) == (0 if life == 3 else -9)
        lives.append(lines_of(file))
        committed.append(store.read([partition_of(pipeline)]).get(0, {"log_offset": 0})["log_offset"])
    for seen in lives:
        offsets = [at for at, *_ in seen]
        assert offsets == sorted(set(offsets))  # in order, and none twice in one process
    everything = {entry for seen in lives for entry in seen}
    offset_of = {}
    for at, topic, number in everything:
        assert offset_of.setdefault((topic, number), at) == at  # the same change at the same position
    for table in ("orders", "lines"):
        expected = {number for (number,) in pg.query(f"select id from {table}")}
        assert {number for topic, number in offset_of if topic == f"public.{table}"} == expected
    for before, seen in zip(committed, lives[1:], strict=False):
        # Exactly from the commit on: nothing before it repeats, and nothing after it is missing.
        later = sorted(at for at, *_ in everything if at >= before)
        assert [at for at, *_ in seen] == later[: len(seen)]


def test_the_next_engine_continues_after_the_record_at_which_a_handler_stopped(
    pg: Database, settings
) -> None:
    insert(pg, 10)
    seen: list[int] = []

    def until_seven(record) -> None:
        seen.append(record.after["id"])
        if len(seen) == 7:
            raise StopEngine

    Engine(settings, on_record=until_seven).run()
    assert len(seen) == 7
    Engine(
        settings, settings={"until_caught_up": True}, on_record=lambda record: seen.append(record.after["id"])
    ).run()
    assert sorted(seen) == list(range(1, 11))


def test_a_handler_is_called_again_after_a_retriable_error_and_loses_nothing_after_another(
    pg: Database, settings
) -> None:
    insert(pg, 5)
    attempts: list[int] = []

    def at_the_third_attempt(batch) -> None:
        attempts.append(len(batch))
        if len(attempts) < 3:
            raise RetriableError("later")

    quick = {**OFTEN, "errors_retry_delay_initial_ms": 1}
    Engine(settings, settings={"until_caught_up": True}, options=quick, on_batch=at_the_third_attempt).run()
    assert len(attempts) == 3
    insert(pg, 5)

    def broken(batch) -> None:
        raise ValueError("ours")

    with pytest.raises(TailraceError) as raised:
        Engine(settings, on_batch=broken).run()
    assert raised.value.kind is Kind.TASK_FAILED
    seen: list[int] = []
    Engine(
        settings,
        settings={"until_caught_up": True},
        on_batch=lambda batch: seen.extend(r.after["id"] for r in batch),
    ).run()
    assert seen == list(range(6, 11))


@pytest.mark.parametrize("converter", ["json", "cloudevents"])
def test_a_handler_gets_events_of_its_converter(pg: Database, settings, converter: str) -> None:
    insert(pg, 3)
    pg.execute("insert into lines default values")
    values: list[dict] = []
    Engine(
        settings,
        settings={"until_caught_up": True},
        options={**OFTEN, "converter": {"type": converter}},
        on_batch=lambda events: values.extend(json.loads(event.value) for event in events),
    ).run()
    if converter == "cloudevents":
        assert {value["specversion"] for value in values} == {"1.0"}
        values = [{"op": value["iodebeziumop"], **value["data"], "source": None} for value in values]
    else:
        assert {value["source"]["name"] for value in values} == {"shop"}
    assert {value["op"] for value in values} == {"r"}
    assert sorted(value["after"]["id"] for value in values if "what" in value["after"]) == [1, 2, 3]
    assert len(values) == 4


def test_a_missing_server_is_shown_as_an_error_until_it_answers(pg: Database, settings, proxy) -> None:
    way = proxy(pg.port)
    way.stop()
    through = pg.dsn.replace(f":{pg.port}/", f":{way.port}/")
    settings["source"] |= {"dsn": through, "reconnect_s_max": 600}
    seen = []
    with Engine(settings, on_record=lambda record: seen.append(record.after["id"])) as engine:
        error = wait_until(lambda: engine.error, what="why the source can't be read")
        assert error.kind is Kind.SOURCE_UNREACHABLE
        [task] = engine.view().tasks
        assert task.error.kind is Kind.SOURCE_UNREACHABLE
        assert engine.status()["error"]["kind"] == "source_unreachable"
        assert re.search(r"^tailrace_engine_source_errors\{.*\} 1.0$", engine.metrics.text(), re.MULTILINE)
        way.start()
        wait_until(lambda: engine.error is None, what="the server")
        assert engine.view().tasks[0].error is None
        wait_until(
            lambda: (
                pg.query(
                    "select active from pg_replication_slots where slot_name = %s",
                    [settings["source"]["slot"]],
                )
                == [(True,)]
            )
        )
        insert(pg, 1)
        wait_until(lambda: seen == [1], what="its record")
    assert engine.error is None
