"""Snapshots that are asked for while the stream goes on, and tables that were added later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capture.captured import SLOT, Running, capturing
from capture.folded import fold
from capture.test_snapshot_resumed import SMALL, create_tables, judge, life, until_whole, writers_at_work
from fix_postgres import Database
from fix_wait import wait_until
from tailrace import failpoints
from tailrace.capture.agenda import Agenda, Outcome, SnapshotAgenda
from tailrace.capture.ledger import agenda_name
from tailrace.capture.requests import ask, waiting
from tailrace.changelog.directory import LogDirectory
from tailrace.errors import Kind, TailraceError

KEYED = ("public.items", "public.pairs", "public.parts")


def request(log: Path, *tables: str, where: str = "", cancels: bool = False) -> str:
    return ask(LogDirectory.open(log), "0", tables=tables, where=where, cancels=cancels).id


def found(log: Path, id_: str) -> SnapshotAgenda | None:
    content = LogDirectory.open(log).state_read(agenda_name("0"))
    return None if content is None else Agenda.from_json(content).find(id_)


def is_over(log: Path, id_: str) -> Callable[[], bool]:
    def look() -> bool:
        snapshot = found(log, id_)
        return snapshot is not None and snapshot.outcome is not Outcome.OPEN

    return look


def await_end(running: Running, log: Path, id_: str) -> SnapshotAgenda:
    over = is_over(log, id_)
    wait_until(lambda: running.is_over or over(), 120, "the snapshot")
    assert not running.is_over, running.error
    snapshot = found(log, id_)
    assert snapshot is not None
    return snapshot


def test_tables_are_read_again_among_writers_with_no_row_lost_or_out_of_order(
    pg: Database, tmp_path: Path
) -> None:
    create_tables(pg)
    log = tmp_path / "log"
    with writers_at_work(pg), capturing(pg.dsn, log, **SMALL) as running:
        running.wait_for("streaming")
        first = request(log, *KEYED)
        second = request(log, "public.items", where="n > 0")
        assert await_end(running, log, first).outcome is Outcome.DONE
        assert await_end(running, log, second).outcome is Outcome.DONE
    until_whole(pg, log)
    tables = judge(pg, log)
    for table in ("items", "pairs", "parts"):
        assert tables[table].ops["r"] > 1.5 * len(tables[table].rows) / 2
    assert waiting(LogDirectory.open(log), "0") == []


@pytest.mark.slow
def test_kills_in_a_snapshot_that_was_asked_for_neither_lose_nor_repeat_it(
    pg: Database, tmp_path: Path
) -> None:
    create_tables(pg)
    pg.execute("create table still(id int primary key)")
    pg.execute("insert into still select generate_series(1, 2500)")
    log = tmp_path / "log"
    until_whole(pg, log)
    asked = request(log, *KEYED)
    of_some = request(log, "public.still", where="id > 900")
    with writers_at_work(pg, 5):
        for point in ("before_window", "in_window@2", "after_chunk@2", "after_window", "before_finish"):
            name, _, count = point.partition("@")
            assert life(pg, log, f"snapshot.{name}=kill@{count or 1}") in {-9, 0}, point
    until_whole(pg, log)
    assert judge(pg, log)["still"].ops == {"r": 2500 + 1600}
    for id_ in (asked, of_some):
        snapshot = found(log, id_)
        assert snapshot is not None
        assert snapshot.outcome is Outcome.DONE


def test_a_table_that_was_added_while_nothing_ran_comes_once_and_whole(pg: Database, tmp_path: Path) -> None:
    create_tables(pg)
    log = tmp_path / "log"
    until_whole(pg, log)
    pg.execute("create table later(id int primary key, n int not null default 0)")
    pg.execute("insert into later select n, 0 from generate_series(1, 400) n")
    pg.execute(f"alter publication {SLOT} add table later")
    pg.execute("insert into later select n, 0 from generate_series(401, 450) n")
    asked = request(log, "public.later")
    with capturing(pg.dsn, log, **SMALL) as running:
        number = 1000
        while not is_over(log, asked)():
            assert not running.is_over, running.error
            number += 1
            pg.execute(f"insert into later values ({number})")
            pg.execute(f"update later set n = n + 1 where id = {number - 990}")
        running.catch_up(pg.query, 60)
    later = fold(log)["later"]
    assert set((later.reads + later.creates).values()) == {1}
    rows = pg.query("select id::text, n::text from later")
    assert later.values == sorted(tuple(row) for row in rows)


def test_a_plan_for_which_the_disk_has_no_room_is_made_again(
    pg: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_tables(pg)
    log = tmp_path / "log"
    until_whole(pg, log)
    write, refused = LogDirectory.state_write, []

    def short_of_room(directory: LogDirectory, name: str, content: dict[str, Any]) -> None:
        if "/snapshot-" in name and len(refused) < 2:
            refused.append(name)
            raise TailraceError(Kind.LOG_FULL, f"write {name}: No space left on device")
        write(directory, name, content)

    monkeypatch.setattr(LogDirectory, "state_write", short_of_room)
    asked = request(log, *KEYED)
    with capturing(pg.dsn, log, **SMALL) as running:
        assert await_end(running, log, asked).outcome is Outcome.DONE
    assert len(refused) == 2
    judge(pg, log)


def test_a_snapshot_that_is_taken_back_ends_and_another_and_the_stream_go_on(
    pg: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_tables(pg)
    log = tmp_path / "log"
    until_whole(pg, log)
    begun, waits, stays = request(log, *KEYED[:2]), request(log, KEYED[1]), request(log, KEYED[2])
    windows = []

    def hit(name: str) -> None:
        if name == "snapshot.after_window" and not windows:
            windows.append(name)
            request(log, KEYED[1], cancels=True)  # those that have this table, and no other

    monkeypatch.setattr(failpoints, "hit", hit)
    with capturing(pg.dsn, log, **SMALL) as running:
        for id_, outcome in ((begun, Outcome.CANCELLED), (waits, Outcome.CANCELLED), (stays, Outcome.DONE)):
            assert await_end(running, log, id_).outcome is outcome
        pg.execute("insert into items values (77777, 1)")
        running.catch_up(pg.query, 60)
        assert all(table.done for table in running.task.progress().snapshot.values())
    tables = judge(pg, log)
    assert tables["items"].ops["r"] > 3000
    assert tables["pairs"].ops["r"] == 2500
    assert tables["parts"].ops["r"] == 2 * 2900
    again = request(log, *KEYED[:2])
    with capturing(pg.dsn, log, **SMALL) as running:
        assert await_end(running, log, again).outcome is Outcome.DONE
    assert judge(pg, log)["pairs"].ops["r"] == 2 * 2500


@pytest.mark.parametrize(
    ("tables", "where", "told"),
    [(("public.nowhere",), "", "public.nowhere"), (("public.items",), "no_such > 1", "no_such")],
)
def test_one_that_can_not_be_taken_says_why_and_the_stream_goes_on(
    pg: Database, tmp_path: Path, tables: tuple[str, ...], where: str, told: str
) -> None:
    create_tables(pg)
    log = tmp_path / "log"
    with capturing(pg.dsn, log, **SMALL) as running:
        running.wait_for("streaming")
        snapshot = await_end(running, log, request(log, *tables, where=where))
        pg.execute("insert into items values (77777, 1)")
        running.catch_up(pg.query, 60)
    assert snapshot.outcome is Outcome.FAILED
    assert snapshot.error is not None
    assert told in snapshot.error["message"]
    until_whole(pg, log)
    assert judge(pg, log)["items"].ops == {"r": 3000, "c": 1}, "it began again"
