"""Facts learned within an interrupted transaction are not in force, with the server ahead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tailrace.changelog.reader import LogReader
from tailrace.protocol.frames import Bytes, Summary
from tailrace.sources.postgres.streaming.appender import PostgresAppender
from tests.support.capture.captured import capturing
from tests.support.postgres import Database
from tests.support.proxy import Proxy
from tests.support.sinks.ddl_story import Nearby, make, write
from tests.support.wait import wait_until

pytestmark = pytest.mark.each_postgres("what the catalogue says of columns")

#: Enough rows for several reads.
ROWS = 100_000


def columns_in_force(appender: PostgresAppender) -> set[str]:
    oids = [int(key[1:]) for key in appender.schema_in_force if key.startswith("F")]
    found = [appender.facts_in_force.get(oid) for oid in oids]
    return {column.name for facts in found if facts is not None for column in facts.columns}


def test_facts_of_an_interrupted_transaction_are_looked_up_again(
    pg: Database,
    tmp_path: Path,
    proxy: Callable[[int], Proxy],
    spark: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    between = proxy(pg.port)
    dsn = pg.dsn.replace(f":{pg.port}", f":{between.port}")
    log, lake = tmp_path / "log", tmp_path / "lake"
    pg.execute("create table items(id int primary key, a int, b text)")
    pg.execute("insert into items select n, n, 'old' from generate_series(1, 5) n")
    with capturing(dsn, log) as running:
        running.wait_for("streaming")
        pg.execute("insert into items values (6, 6, 'old')")
        running.catch_up(pg.query)
    # The server is ahead: the table is altered twice more after the first transaction.
    pg.execute(
        "begin; alter table items add c int default 7; "
        f"insert into items select n, n, 'first', 8 from generate_series(100, {100 + ROWS}) n; commit"
    )
    pg.execute("alter table items rename a to aa")
    pg.execute("insert into items values (7, 7, 'second', 9)")
    known: list[tuple[bool, bool]] = []
    discard = PostgresAppender.discard_open_unit

    def discard_and_alter(appender: PostgresAppender) -> None:
        within, before = appender.unit_open, columns_in_force(appender)
        discard(appender)
        if not within:
            return
        known.append(("c" in before, "c" in columns_in_force(appender)))
        # Before it connects again, the facts of the transaction no longer apply.
        for statement in (
            "alter table items drop b",
            "alter table items add b int default 3",
            "alter table items rename c to cc",
            "insert into items(id, aa, cc, b) values (8, 8, 10, 4)",
        ):
            pg.execute(statement)

    append = PostgresAppender.append

    def append_and_cut(appender: PostgresAppender, chunk: Bytes) -> Summary:
        summary = append(appender, chunk)
        if not known and appender.unit_open and "c" in columns_in_force(appender):
            between.cut_now()
        return summary

    monkeypatch.setattr(PostgresAppender, "discard_open_unit", discard_and_alter)
    monkeypatch.setattr(PostgresAppender, "append", append_and_cut)
    with capturing(dsn, log) as running:
        wait_until(lambda: known, 60, "the cut")
        running.catch_up(pg.query)
        in_force = running.task._log.appender.schema_in_force
    assert known == [(True, False)]
    with LogReader.open(log, "0") as reader:
        end = reader.end().offset
        held = dict.fromkeys(reader.all_schema_frames(reader.start, end))
    assert set(in_force.values()) <= set(held)
    write(make("mirror", lake), log, end, Nearby(spark))
    rows = DeltaTable(str(lake / "public.items")).to_pyarrow_table().drop_columns(["_position"]).to_pylist()
    columns = ("id", "aa", "cc", "b")
    source = pg.query("select id, aa, cc, b from items order by id")
    assert sorted((row["id"], row["aa"], row["cc"], row["b"]) for row in rows) == source
    assert set(rows[0]) == set(columns)
