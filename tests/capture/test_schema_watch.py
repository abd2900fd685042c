"""The facts of tables as of the position in the stream to which they belong."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from structlog.testing import capture_logs

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.disclosure import keep_disclosure
from tailrace.changelog.reader import LogReader
from tailrace.changelog.verify import verify
from tailrace.cli.log_contents import show_schemas
from tailrace.config import ColumnPolicy
from tailrace.model import Column, parse_lsn
from tailrace.pipeline.log.schemas import versions
from tailrace.protocol.facts import ColumnFacts, Facts
from tailrace.ranges.changes import decoded_batches
from tailrace.ranges.plan import input_splits
from tailrace.sources.postgres.schema import relation_messages
from tailrace.sources.postgres.schema.column_matching import CatalogColumn, aligned
from tailrace.sources.postgres.schema.table_facts import CatalogTable, CatalogTables, missing_columns
from tailrace_servers.postgres import EmbeddedPostgres
from tests.support.capture.captured import SLOT, Running, capturing, make_task, read_log
from tests.support.capture.folded import fold
from tests.support.postgres import Database, require_since
from tests.support.wait import wait_until

pytestmark = pytest.mark.each_postgres("what the catalogue says, and when")

INT, TEXT = 23, 25


def sent(*columns):
    return [Column(name, kind, -1, in_identity=False) for name, kind in columns]


def there(number, name, kind=INT, *, later=False, not_sent=False):
    return CatalogColumn(number, name, False, kind, -1, later, not_sent)


def gone(number, *, later=False):
    return CatalogColumn(number, f"........pg.dropped.{number}........", True, 0, -1, later)


@pytest.mark.parametrize(
    ("message", "catalog", "before", "numbers"),
    [
        ("ab", [there(1, "a"), there(2, "b")], {}, [1, 2]),
        ("ab", [there(1, "a"), there(2, "x"), there(3, "b")], {}, [1, 3]),  # x is not published
        # renamed later: the last transaction on the row is newer than the message
        ("ab", [there(1, "a"), there(2, "c", later=True)], {"a": 1, "b": 2}, [1, 2]),
        # dropped later, another one added later
        ("ab", [there(1, "a"), gone(2, later=True), there(3, "c", later=True)], {"a": 1, "b": 2}, [1, 2]),
        # dropped before the message: the added one is sent
        ("ab", [there(1, "a"), gone(2), there(3, "b")], {"a": 1, "b": 2}, [1, 3]),
        # dropped and added again with the same name, after the message
        ("ab", [there(1, "a"), gone(2, later=True), there(3, "b", later=True)], {"a": 1, "b": 2}, [1, 2]),
        # added before the message, dropped later
        ("ab", [there(1, "a"), gone(2), gone(3, later=True)], {"a": 1, "c": 2}, [1, 3]),
        # nothing is known for certain
        ("ab", [there(1, "a"), gone(2)], {}, [1, 0]),
        # names swapped later
        ("ab", [there(1, "b", later=True), there(2, "a", later=True)], {"a": 1, "b": 2}, [1, 2]),
        # renamed later, and its name taken by a column of an older transaction, which ended after the message
        ("a", [there(1, "c", later=True), there(2, "a")], {"a": 1}, [1]),
    ],
)
def test_columns_of_a_message_are_found_in_a_catalogue_that_is_ahead(message, catalog, before, numbers):
    assert aligned(sent(*((name, INT) for name in message)), catalog, before) == numbers


def test_renamed_columns_of_a_table_with_1600_columns_are_found():
    names = [f"c{number}" for number in range(1, 1601)]
    renamed = ("c2", "c1599")
    catalog = [
        there(at, f"new_{name}" if name in renamed else name, later=name in renamed)
        for at, name in enumerate(names, 1)
    ]
    known = {name: at for at, name in enumerate(names, 1)}
    assert aligned(sent(*((name, INT) for name in names)), catalog, known) == [*range(1, 1601)]


def test_a_column_with_another_name_and_type_is_not_taken_for_a_dropped_one():
    catalog = [there(1, "id"), gone(2, later=True), there(3, "count", INT, later=True)]
    assert aligned(sent(("id", INT), ("note", TEXT)), catalog, {"id": 1}) == [1, 2]
    both = sent(("id", INT), ("note", TEXT), ("count", INT))
    assert aligned(both, catalog, {"id": 1, "note": 2}) == [1, 2, 3]


def numbered(facts):
    return {column["name"]: column["number"] for column in facts["columns"]}


def test_each_change_of_a_table_is_in_the_log_before_its_first_row(pg: Database, tmp_path: Path):
    pg.execute("create table items(id int primary key, a text, b text)")
    pg.execute("insert into items values (1, 'a', 'b')")
    with capture_logs() as logs, capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
        pg.execute("insert into items values (2, 'a', 'b')")
        pg.execute("alter table items rename a to c")
        pg.execute("alter table items add d int default 5, add e uuid default gen_random_uuid()")
        pg.execute("insert into items values (3, 'a', 'b')")
        running.catch_up(pg.query)
        pg.execute("alter table items drop b, alter id type bigint")
        pg.execute("alter table items replica identity full")
        pg.execute("insert into items values (4, 'a', 7)")
        running.catch_up(pg.query)
        pg.execute("truncate items")
        running.catch_up(pg.query)  # otherwise the key at the time of the truncate could be in doubt
        pg.execute("alter table items drop constraint items_pkey, add primary key (d)")
        pg.execute("insert into items values (5, 'a', 8)")
        running.catch_up(pg.query)
    found = read_log(tmp_path / "log").facts
    shapes = {facts["version"]: facts for facts in found}
    assert list(shapes) == [1, 2, 3, 4]
    assert numbered(shapes[1]) == {"id": 1, "a": 2, "b": 3}
    assert numbered(shapes[2]) == {"id": 1, "c": 2, "b": 3, "d": 4, "e": 5}
    added = shapes[2]["columns"][3:]
    if shapes[2]["columns"][3].get("missing") is None:
        assert added[1].get("unknown"), "a default that differs from row to row"
    assert numbered(shapes[3]) == {"id": 1, "c": 2, "d": 4, "e": 5}
    assert [shapes[version]["primary_key"] for version in shapes] == [["id"], ["id"], ["id"], ["d"]]
    said = [entry["changes"] for entry in logs if entry["event"] == "schema changed"]
    assert said[0][0] == "column a renamed to c"
    assert "column b dropped" in said[1]
    assert said[2][-1] == "primary key (id) to (d)"
    listed = versions(LogDirectory.open(tmp_path / "log"), "0", "public.items")
    assert [(each.relation.version, each.relation.key) for each in listed] == [
        (1, ("id",)),
        (2, ("id",)),
        (3, ("id",)),
        (4, ("d",)),
    ]
    assert [list(each.changes) for each in listed[1:]] == said


def test_the_facts_of_a_column_with_a_default_have_the_value_of_older_rows(pg: Database, tmp_path: Path):
    pg.execute("create table items(id int primary key)")
    pg.execute("insert into items values (1)")
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
        pg.execute("alter table items add a text default 'it''s {,}', add b int, add c int[] default '{1,2}'")
        pg.execute("alter table items alter b set default 3")
        pg.execute("insert into items values (2)")
        running.catch_up(pg.query)
    columns = read_log(tmp_path / "log").facts[-1]["columns"]
    assert [column.get("missing") for column in columns] == [None, "it's {,}", None, "{1,2}"]
    assert not any(column.get("unknown") for column in columns)


def test_schemas_show_no_excluded_column_and_no_masked_default(
    pg: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    log = tmp_path / "log"
    pg.execute("create table items(id int primary key, hidden1 text)")
    with capturing(pg.dsn, log) as running:
        running.wait_for("streaming")
        pg.execute("insert into items values (1, 'x')")
        pg.execute("alter table items rename hidden1 to hidden2")
        pg.execute("alter table items add hidden3 text default 'T0P-1', add mail text default 'T0P-2'")
        pg.execute("insert into items values (2, 'x')")
        running.catch_up(pg.query)
        pg.execute("alter table items drop hidden2, alter hidden3 type varchar(9)")
        pg.execute("insert into items values (3)")
        running.catch_up(pg.query)
    rules = ColumnPolicy.model_validate(
        {"columns_exclude": ["*.*.hidden*"], "masks": [{"columns": ["*.*.mail"], "method": "null"}]}
    )
    keep_disclosure(LogDirectory.open(log), "0", rules)
    assert "T0P-2" in repr(versions(LogDirectory.open(log), "0"))
    assert "T0P" not in repr(versions(LogDirectory.open(log), "0", rules=rules))
    capsys.readouterr()
    for as_json in (False, True):
        show_schemas(log, "0", None, None, as_json=as_json)
    said = capsys.readouterr().out
    assert "column mail added" in said
    assert "hidden" not in said
    show_schemas(log, "0", None, ColumnPolicy(), as_json=False)
    assert "column hidden1 renamed to hidden2" in capsys.readouterr().out


def test_a_recreated_table_continues_its_versions_and_tells_what_became_of_the_old_one(
    pg: Database, tmp_path: Path
):
    pg.execute("create table items(id int primary key)")
    pg.execute("create table things(id int primary key)")
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
        pg.execute("insert into items values (1)")
        pg.execute("insert into things values (1)")
        pg.execute("drop table items")
        pg.execute("create table items(id int primary key, a int)")
        pg.execute("alter table things rename to old_things")
        pg.execute("create table things(id int primary key)")
        pg.execute("alter publication tailrace_t add table items, things")
        pg.execute("insert into items values (1, 2)")
        pg.execute("insert into things values (2)")
        running.catch_up(pg.query)
    *_, items, things = read_log(tmp_path / "log").facts
    assert (items["table"], items["version"], items["replaced"] > 0) == ("items", 2, True)
    assert "replaced_name" not in items
    assert (things["version"], things["replaced_name"]) == (2, ["public", "old_things"])


def test_a_column_counts_as_not_null_from_the_first_row_on_that_has_to_be(pg: Database, tmp_path: Path):
    pg.execute(f"create publication {SLOT} for all tables")
    pg.execute("create table items(id int primary key, old int)")
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
    # A migration while capture is down, of a table that the log has and of a new one.
    pg.execute("alter table items add c int")
    pg.execute("create table fresh(id int primary key, c int)")
    pg.execute("create table at_once(id int primary key, c int not null); insert into at_once values (1, 1)")
    for table in ("items", "fresh"):
        pg.execute(f"insert into {table} values (1)")
        pg.execute(f"update {table} set c = 1")
        pg.execute(f"alter table {table} alter c set not null")
        pg.execute(f"insert into {table}(id, c) values (2, 2)")
    if pg.server.version >= 18:
        pg.execute("alter table items add constraint later not null old not valid")
        pg.execute("insert into items values (3, 3, 3)")
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.catch_up(pg.query)
    found: dict[str, list[bool]] = {}
    for facts in read_log(tmp_path / "log").facts:
        for column in facts["columns"]:
            found.setdefault(f"{facts['table']}.{column['name']}", []).append(column["not_null"])
    assert found["items.c"][0] is False
    assert found["items.c"][-1] is True
    assert found["fresh.c"] == [False, True]
    assert found["at_once.c"] == [True]
    assert not any(found["items.old"])


def test_facts_are_right_for_each_position_while_the_database_is_ahead(pg: Database, tmp_path: Path):
    pg.execute("create table items(id int primary key, a int, b int)")
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
    for row, change in enumerate(
        [
            "select",
            "alter table items rename a to x",
            "alter table items drop b",
            "alter table items add b int default 9",
            "alter table items drop x, drop b",
        ]
    ):
        pg.execute(change)
        pg.execute("insert into items(id) values (%s)", [row])
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.catch_up(pg.query)
    found = [numbered(facts) for facts in read_log(tmp_path / "log").facts]
    assert found[-5:] == [
        {"id": 1, "a": 2, "b": 3},
        {"id": 1, "x": 2, "b": 3},
        {"id": 1, "x": 2},
        {"id": 1, "x": 2, "b": 4},
        {"id": 1},
    ]


def test_a_key_that_changed_before_or_after_a_transactions_rows_is_given_with_the_former_one(
    pg: Database, tmp_path: Path
):
    """A subtransaction has a newer xid than its transaction, and so has one that ended within it."""
    tables, log = ("own", "sub", "older", "later"), tmp_path / "log"
    for table in tables:
        pg.execute(f"create table {table}(id int primary key, region text not null)")
        pg.execute(f"alter table {table} replica identity full")
    with capturing(pg.dsn, log) as running:
        running.wait_for("streaming")

    def told() -> dict[str, tuple[list[str], list[str]]]:
        return {
            facts["table"]: (
                facts["primary_key"], [each["name"] for each in facts["columns"] if each.get("may_be_key")]
            )
            for facts in read_log(log).facts
        }  # fmt: skip

    alter = "alter table {0} drop constraint {0}_pkey, add primary key (id, region)"
    with pg.connect(autocommit=False) as session, pg.connect(autocommit=True) as other:
        session.execute(alter.format("own"))
        session.execute("insert into own values (1, 'a')")
        session.execute("savepoint s")
        session.execute(alter.format("sub"))
        session.execute("release s")
        session.execute("insert into sub values (1, 'a')")
        other.execute(alter.format("older"))
        session.execute("insert into older values (1, 'a')")
        session.execute("insert into later values (1, 'a')")
        session.commit()
        other.execute(alter.format("later"))
    with capturing(pg.dsn, log) as running:
        running.catch_up(pg.query)
        assert told() == dict.fromkeys(tables, (["id"], ["region"]))
        for table in tables:
            pg.execute(f"insert into {table} values (1, 'b')")
        running.catch_up(pg.query)
    assert told() == dict.fromkeys(tables, (["id", "region"], []))


def test_a_key_that_a_table_did_not_have_is_not_that_of_earlier_rows(pg: Database, tmp_path: Path):
    """Two of them may have the same values in its columns."""
    tables, log = ("own", "later", "ahead"), tmp_path / "log"
    for table in tables:
        pg.execute(f"create table {table}(id int, n int); alter table {table} replica identity full")
        pg.execute(f"insert into {table} values (1, 1), (1, 2)")
    with capturing(pg.dsn, log) as running:
        running.wait_for("streaming")
    delete, alter = "delete from {0} where n = 2", "alter table {0} add primary key (id)"
    with pg.connect(autocommit=False) as session:
        session.execute(delete.format("own"))
        session.execute(alter.format("own"))
    pg.execute(delete.format("later"))
    pg.execute(alter.format("later"))
    pg.execute(delete.format("ahead"))

    def keys() -> dict[str, list[str]]:
        return {facts["table"]: facts["primary_key"] for facts in read_log(log).facts}

    with capturing(pg.dsn, log) as running:
        running.catch_up(pg.query)
        assert keys() == {table: [] for table in tables}
        pg.execute(alter.format("ahead"))
        for table in tables:
            pg.execute(f"insert into {table} values (2, 2)")
        running.catch_up(pg.query)
    assert keys() == {table: ["id"] for table in tables}


def test_the_session_that_reads_the_catalogue_may_be_terminated(pg: Database, tmp_path: Path):
    pg.execute("create table items(id int primary key)")
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
        for row in range(3):
            pg.execute(f"alter table items add c{row} int")
            pg.execute("insert into items(id) values (%s)", [row])
            running.catch_up(pg.query)
            ended = pg.query(
                "select pg_terminate_backend(pid) from pg_stat_activity where query like %s and pid <> %s",
                ["%l.relfilenode%", pg.query("select pg_backend_pid()")[0][0]],
            )
            assert ended
        assert running.task.progress().reconnects == 0
    assert len(read_log(tmp_path / "log").facts[-1]["columns"]) == 4


def test_log_lines_about_a_schema_change_name_no_excluded_column(pg: Database, tmp_path: Path):
    pg.execute("create table items(id int primary key, hidden1 text)")
    pg.execute("alter table items replica identity full")  # so that the server sends it nevertheless
    rules = {"columns_exclude": ("*.*.hidden*",)}
    with capture_logs() as logs, capturing(pg.dsn, tmp_path / "log", **rules) as running:
        running.wait_for("streaming")
        pg.execute("insert into items values (1, 'x')")
        pg.execute("alter table items rename hidden1 to hidden2")
        pg.execute("insert into items values (2, 'x')")
        pg.execute("alter table items add a int, drop hidden2")
        pg.execute("insert into items values (3)")
        running.catch_up(pg.query)
    said = [entry["changes"] for entry in logs if entry["event"] == "schema changed"]
    assert said == [["column a added (integer)"]]


FACTS = Facts(1, "public", "items", ("a",), (ColumnFacts("a", 1), ColumnFacts("b", 2)), 1)


def held(number, name, *, dropped=False, generated=False, xid=100):
    return {"number": number, "name": name, "dropped": dropped, "generated": generated, "xid": xid}


@pytest.mark.parametrize(
    ("message", "catalog", "lost"),
    [
        ({"a": 1, "b": 2}, [held(1, "a"), held(2, "b")], ()),
        ({"a": 1}, [held(1, "a"), held(2, "b", dropped=True)], ()),
        ({"a": 1}, [held(1, "a"), held(2, "b")], ("b",)),
        ({"a": 1}, [held(1, "a"), held(2, "b", xid=300)], ("b",)),  # changed later, but with the same name
        ({"a": 1, "c": 2}, [held(1, "a"), held(2, "c")], ()),  # renamed before the message
        ({"a": 1, "c": 0}, [held(1, "a"), held(2, "d", xid=300)], ()),  # perhaps renamed twice
        ({"a": 1}, [held(1, "a"), held(2, "d", xid=300)], ()),
        ({"a": 1}, [held(1, "a"), held(2, "b", generated=True)], ()),
        ({"b": 2}, [held(2, "b")], ()),
    ],
)
def test_an_existing_column_that_is_not_sent_is_detected(message, catalog, lost):
    table = CatalogTable(1, "public", "items", 90, 5, tuple(catalog), (1,), 90, next_xid=400)
    facts = replace(FACTS, columns=tuple(ColumnFacts(*each) for each in message.items()))
    columns = sent(*((name, INT) for name in message))
    assert tuple(column.name for column in missing_columns(columns, facts, table, FACTS, xid=200)) == lost
    assert missing_columns(columns, facts, table, None, xid=200) == ()
    assert missing_columns(columns, facts, None, FACTS, xid=200) == ()


def test_a_column_removed_from_the_column_list_is_not_reported_as_lost(pg: Database, tmp_path: Path):
    require_since(15, "column lists", pg.server.version)
    pg.execute("create table items(id int primary key, a int, b int)")
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
        pg.execute("insert into items values (1, 1, 1)")
        pg.execute("alter publication tailrace_t set table items (id, b)")
        pg.execute("insert into items values (2, 2, 2)")
        running.catch_up(pg.query)
        pg.execute("alter publication tailrace_t set table items (id)")
        pg.execute("insert into items values (3, 3, 3)")
        pg.execute("alter publication tailrace_t set table items")
        pg.execute("insert into items values (4, 4, 4)")
        running.catch_up(pg.query)
    # The list is gone before the row that was sent by it is read.
    pg.execute("alter publication tailrace_t set table items (id, b)")
    pg.execute("insert into items values (5, 5, 5)")
    pg.execute("alter publication tailrace_t drop table items")
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.catch_up(pg.query)
    columns = [list(numbered(facts).values()) for facts in read_log(tmp_path / "log").facts]
    assert columns[-5:] == [[1, 2, 3], [1, 3], [1], [1, 2, 3], [1, 3]]


def test_a_column_added_while_the_slot_is_created_is_sent(own_pg: EmbeddedPostgres, tmp_path: Path):
    """PostgreSQL decodes a transaction that began before the column's ended as if the column did not exist.

    On a separate server: after other slots have decoded there, a slot is created without a wait.
    """
    pg = own_pg
    pg.execute("create table items(id int primary key, a int)")
    pg.execute("create table other(id int primary key)")
    pg.execute("insert into items values (1, 1)")

    def slot_waits_for(xid: str) -> bool:
        waiting = "select 1 from pg_locks where not granted and transactionid::text = %s"
        return bool(pg.query(waiting, [xid]))

    with (
        psycopg.connect(pg.dsn()) as older,
        psycopg.connect(pg.dsn()) as altering,
        psycopg.connect(pg.dsn()) as writing,
    ):
        [[xid]] = older.execute("select txid_current()::text").fetchall()
        running = Running(make_task(pg.dsn(), tmp_path / "log"))
        wait_until(lambda: slot_waits_for(xid), 60)
        altering.execute("alter table items add n int default 5")
        [[xid]] = altering.execute("select txid_current()::text").fetchall()
        older.commit()
        wait_until(lambda: slot_waits_for(xid), 60)
        writing.execute("insert into other values (1)")
        altering.commit()
        # With that column never seen, or at the second attempt.
        progress = running.task.progress
        wait_until(lambda: progress().phase == "streaming" or progress().reconnects > 0, 60, "a beginning")
        writing.execute("insert into items values (2, 2, 2)")
        writing.commit()
        running.wait_for("streaming", 60)
    pg.execute("insert into items values (3, 3, 3)")
    position = parse_lsn(pg.query("select pg_current_wal_insert_lsn()::text")[0][0])
    pg.query("select pg_switch_wal()")
    wait_until(lambda: running.is_over or running.task.caught_up(position), 60)
    running.stop()
    assert [row["n"] for row in fold(tmp_path / "log")["items"].rows.values()] == ["5", "2", "3"]


def test_a_transaction_counts_as_seen_if_it_is_neither_running_nor_in_the_future() -> None:
    seen = CatalogTables({}, next_xid=400, running=frozenset({395}))
    assert [seen.sees(xid) for xid in (394, 395, 399, 400, 401)] == [True, False, True, False, False]
    wrapped = CatalogTables({}, next_xid=5)
    assert wrapped.sees(4_294_967_290)


def test_a_rename_is_followed_although_other_sessions_see_it_later_than_the_stream(
    own_pg: EmbeddedPostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that waits for a synchronous standby is streamed, but not visible to other sessions yet."""
    monkeypatch.setattr(relation_messages, "_VISIBLE_DEADLINE_S", 60.0)
    own_pg.execute("create table items(id int primary key, a int)")
    with capturing(own_pg.dsn(), tmp_path / "log") as running:
        running.wait_for("streaming")
        own_pg.execute("insert into items values (1, 1)")
        running.catch_up(own_pg.query)
        _wait_for_standby(own_pg, "nobody")
        changing = threading.Thread(
            target=own_pg.execute,
            args=("begin; alter table items rename a to aa; insert into items values (2, 2); commit",),
        )
        changing.start()
        wait_until(lambda: _commits_waiting(own_pg) == 1, 60, "the commit to wait for a standby")
        _wait_for_standby(own_pg, "")
        changing.join(30)
        running.catch_up(own_pg.query)
    _, after = versions(LogDirectory.open(tmp_path / "log"), "0")
    assert after.changes == ("column a renamed to aa",)


def _wait_for_standby(pg: EmbeddedPostgres, name: str) -> None:
    pg.execute(f"alter system set synchronous_standby_names = '{name}'")
    pg.execute("select pg_reload_conf()")


def _commits_waiting(pg: EmbeddedPostgres) -> int:
    ((count,),) = pg.query("select count(*) from pg_stat_activity where wait_event = 'SyncRep'")
    return int(count)


def test_a_table_described_hundreds_of_times_is_read_from_the_log(pg: Database, tmp_path: Path):
    """The decoder's table of groups once had 255 slots; TRUNCATE alone makes a group each time."""
    pg.execute("create table items(id int primary key); create table others(id int primary key)")
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
        with pg.connect() as connection:
            for n in range(300):
                connection.execute(f"truncate items; insert into items values ({n})")
                if n % 100 == 0:
                    connection.execute(f"alter table others add c{n} int; insert into others values ({n})")
        running.catch_up(pg.query)
    with LogReader.open(tmp_path / "log", "0") as reader:
        start, end = reader.start, reader.end().offset
        parts = input_splits("0", reader.blocks(start, end), start, end)
    batches = (decoded for split in parts for decoded in decoded_batches(tmp_path / "log", split))
    found = [changes for decoded in batches for changes in decoded.changes]
    items = [changes for changes in found if changes.relation.table == "items"]
    assert sum(int((changes.op == ord("c")).sum()) for changes in items) == 300
    assert sum(changes.count for changes in found) == 603
    assert verify(tmp_path / "log").sound


def test_the_definition_of_a_columns_former_type_stays_known_while_the_catalogue_is_ahead(
    pg: Database, tmp_path: Path
):
    pg.execute("create type mood as enum ('well', 'ill')")
    pg.execute("create table items(id int primary key, e mood)")
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
    # Both come when the stream goes on: rows with the enumeration, then the other type.
    pg.execute("insert into items values (1, 'well')")
    pg.execute("alter table items alter e type text")
    pg.execute("insert into items values (2, 'well')")
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.catch_up(pg.query)
    first, *_ = [facts for facts in read_log(tmp_path / "log").facts if facts["table"] == "items"]
    last = [facts for facts in read_log(tmp_path / "log").facts if facts["columns"][1]["type_oid"] != TEXT][
        -1
    ]
    assert first["columns"][1]["types"]
    assert last["columns"][1]["types"] == first["columns"][1]["types"]


@pytest.mark.parametrize(
    ("changes", "numbers", "unknown"),
    [
        # another column has the name by now, and the first one has another name
        (
            ["alter table items rename a to old; alter table items add a int"],
            [{"id": 1, "a": 2}, {"id": 1, "old": 2, "a": 3}],
            [],
        ),
        # renamed by a transaction that began before the row's and ended after it
        (["early alter table items rename a to b"], [{"id": 1, "a": 2}, {"id": 1, "b": 2}], []),
        (["early alter table items drop a"], [{"id": 1, "a": 2}, {"id": 1}], []),
        # one added and dropped, and another one; or one added after a dropped one, and renamed
        (
            ["alter table items add x int", "alter table items drop x, add y int"],
            [{"id": 1, "a": 2}, {"id": 1, "a": 2, "x": 0}, {"id": 1, "a": 2, "y": 4}],
            ["x", "y"],
        ),
        (
            ["alter table items drop a, add b int", "alter table items rename b to c"],
            [{"id": 1, "a": 2}, {"id": 1, "b": 3}, {"id": 1, "c": 3}],
            [],
        ),
        (
            [
                "alter table items drop a, add b int; insert into items(id) values (-1)",
                "alter table items rename b to c",
            ],
            [{"id": 1, "a": 2}, {"id": 1, "b": 0}, {"id": 1, "b": 3}, {"id": 1, "c": 3}],
            ["b", "b", "c"],
        ),
    ],
)
def test_a_column_is_never_taken_for_another_one(pg: Database, tmp_path: Path, changes, numbers, unknown):
    pg.execute("create table items(id int primary key, a int)")
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
        pg.execute("insert into items values (0, 0)")
        running.catch_up(pg.query)
    had = len(read_log(tmp_path / "log").facts) - 1
    with psycopg.connect(pg.dsn) as early:
        early.execute("select pg_current_xact_id()")
        pg.execute("insert into items(id) values (1)")
        for row, change in enumerate(changes, 2):
            if change.startswith("early "):
                early.execute(change.removeprefix("early "))
                early.commit()
            else:
                pg.execute(change)
            pg.execute("insert into items(id) values (%s)", [row])
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.catch_up(pg.query)
    found = read_log(tmp_path / "log").facts[had:]
    assert [numbered(facts) for facts in found] == numbers
    assert [c["name"] for facts in found for c in facts["columns"] if c.get("unknown")] == unknown
