"""Follows the hints of errors about data in sinks as they are printed, and compares the sink with the source.

Names, SQL, settings and commands are taken from the printed text.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from typing import Any

import pytest
from deltalake import DeltaTable

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.retention.policy import RetentionRules
from tailrace.changelog.retention.prune import apply
from tailrace.errors import Kind
from tailrace.sources.postgres.slot.way_out import with_way_out
from tests.support.pipeline.shop import Shop
from tests.support.postgres import Database
from tests.support.sinks.ddl_story import selected
from tests.support.sinks.mirrored import mirrored


def setting_in(hint: str) -> dict[str, str]:
    """Return the sink's setting in a hint."""
    found = re.search(r"`(\w+): (\w+)` for the sink", hint)
    assert found is not None, hint
    return {found[1]: found[2]}


# ---------------------------------------------------------------------- tables without a key


def keyless(shop: Shop) -> str:
    """Let a mirror stop at a table without a key; return the hint."""
    shop.pg.execute("create table visits(host text, n int)")
    shop.pg.execute("create table items(id int primary key, n int)")
    shop.pg.execute("insert into visits values ('a', 1), ('a', 1), ('b', 2)")
    shop.pg.execute("insert into items values (1, 1)")
    shop.source["tables"] = ["public.visits", "public.items"]
    error = shop.refused(Kind.SINK_KEY_MISSING)
    shop.pg.execute("insert into visits values ('c', 3)")
    return error.hint


@pytest.mark.follows("sink_key_missing")
def test_a_table_that_gets_a_key_is_mirrored_by_it(shop: Shop) -> None:
    hint = keyless(shop)
    found = re.search(r"\((ALTER TABLE \S+ ADD PRIMARY KEY) …\)", hint)
    assert found is not None
    shop.pg.execute("create table twice as select distinct * from visits; truncate visits")
    shop.pg.execute("insert into visits select * from twice; drop table twice")
    shop.pg.execute(f"{found[1]} (host)")
    assert "begin with a new log, a new snapshot and an empty path" in hint
    shop.begin_with_a_new_log()
    shop.run()
    shop.pg.execute("update visits set n = 4 where host = 'c'")
    shop.run()
    shop.require_equal("visits", "items")


@pytest.mark.follows("sink_key_missing")
def test_a_table_is_mirrored_by_columns_that_identify_its_rows(shop: Shop) -> None:
    hint = keyless(shop)
    shop.pg.execute("truncate visits; insert into visits values ('a', 1), ('b', 2)")
    found = re.search(r"name columns that tell its rows apart in source\.(\w+), and start again", hint)
    assert found is not None
    shop.source[found[1]] = {"public.visits": ["host"]}
    shop.run()
    shop.require_equal("visits", "items")


@pytest.mark.follows("sink_key_missing")
@pytest.mark.ci
def test_a_table_is_mirrored_by_full_rows(shop: Shop) -> None:
    hint = keyless(shop)
    found = re.search(r"\((ALTER TABLE \S+ REPLICA IDENTITY FULL), and", hint)
    assert found is not None
    shop.pg.execute(found[1])
    shop.sink |= setting_in(hint)
    shop.pg.execute("update visits set n = 4 where host = 'c'")
    shop.pg.execute("delete from visits where ctid = (select min(ctid) from visits where host = 'a')")
    shop.run()
    shop.require_equal("visits", "items")


@pytest.mark.follows("sink_key_missing")
def test_a_table_without_a_key_is_excluded(shop: Shop) -> None:
    hint = keyless(shop)
    assert "leave it out of the sink's `tables`" in hint
    shop.sink["tables"] = ["public.items"]
    shop.run()
    shop.require_equal("items")


# ---------------------------------------------------------------------- changes of schema


ALTERED = {
    "rewritten": "alter table items alter what type int using length(what)",
    "values of their own": "alter table items add more float8 default random()",
}


def altered(shop: Shop, case: str) -> str:
    """Let a mirror stop at a change that it can't follow; return the hint."""
    shop.pg.execute("create table items(id int primary key, what text)")
    shop.pg.execute("create table others(id int primary key)")
    shop.pg.execute("insert into items select n, repeat('x', n) from generate_series(1, 5) n")
    shop.run()
    shop.pg.execute(ALTERED[case])
    shop.pg.execute("insert into items(id) values (6)")
    shop.pg.execute("insert into others values (1)")
    hint = shop.refused(Kind.SINK_SCHEMA_REFUSED).hint
    shop.pg.execute("delete from items where id = 2")
    return hint


@pytest.mark.follows("sink_schema_refused", "Follow as far as possible")
@pytest.mark.parametrize("case", ALTERED)
def test_a_mirror_follows_as_far_as_possible_and_the_table_is_read_again(shop: Shop, case: str) -> None:
    hint = altered(shop, case)
    shop.sink |= setting_in(hint)
    shop.run()
    found = re.search(r"`(tailrace snapshot .*?)`", hint)
    assert found is not None
    shop.command(found[1])
    shop.run()
    shop.require_equal("items", "others")


@pytest.mark.follows("sink_schema_refused", "Start again")
@pytest.mark.parametrize("case", ALTERED)
def test_a_mirror_that_can_not_follow_begins_with_a_new_log(shop: Shop, case: str) -> None:
    hint = altered(shop, case)
    assert "begin with a new log, a new snapshot and an empty path" in hint
    shop.begin_with_a_new_log()
    shop.run()
    shop.require_equal("items", "others")


@pytest.mark.follows("sink_schema_refused", "Leave the table out")
def test_a_table_that_cannot_be_followed_is_excluded(shop: Shop) -> None:
    hint = altered(shop, "rewritten")
    assert "leave the table out of the sink's `tables`" in hint
    shop.sink["tables"] = ["public.others"]
    shop.run()
    shop.require_equal("others")


# ---------------------------------------------------------------------- changed settings

SALT = "0123456789abcdef"

#: Settings of the source before and after, each of which stops a mirror of `public.people`.
CHANGED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mask": (
        {"masks": [{"columns": ["public.people.note"], "method": "truncate", "length": 2}]},
        {"masks": [{"columns": ["public.people.note"], "method": "fixed"}]},
    ),
    "salt": (
        {"masks": [{"columns": ["public.people.note"], "method": "hash", "salt": "${env:SALT_BEFORE}"}]},
        {"masks": [{"columns": ["public.people.note"], "method": "hash", "salt": "${env:SALT_AFTER}"}]},
    ),
    "mask taken away": ({"masks": [{"columns": ["public.people.note"], "method": "fixed"}]}, {"masks": []}),
    "key": ({"message_keys": {}}, {"message_keys": {"public.people": ["note"]}}),
    "handling mode": ({"time_precision_mode": "adaptive"}, {"time_precision_mode": "nanoseconds"}),
}


@pytest.mark.follows("sink_schema_refused")
@pytest.mark.parametrize("way", ["restored", "empty path"])
@pytest.mark.parametrize("case", CHANGED)
def test_a_changed_setting_of_a_mirrors_source(
    shop: Shop, case: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SALT_BEFORE", SALT)
    monkeypatch.setenv("SALT_AFTER", SALT[::-1])
    before, after = CHANGED[case]
    shop.pg.execute("create table people(id int primary key, note text not null, at time)")
    shop.pg.execute("alter table people replica identity full")
    shop.pg.execute("insert into people select n, 'note ' || n, '01:02:03' from generate_series(1, 4) n")
    shop.source |= before
    shop.run()
    shop.source |= after
    shop.pg.execute("update people set note = 'later' where id = 1")
    shop.pg.execute("insert into people values (5, 'new', '04:05:06')")
    hint = shop.refused(Kind.SINK_SCHEMA_REFUSED).hint
    if way == "restored":
        assert "restore the" in hint
        shop.source |= before
    else:
        assert "give the sink a new, empty path, so that it reads the log from its start" in hint
        shop.sink["path"] = "./new lake"
    shop.pg.execute("delete from people where id = 2")
    shop.run()
    found = everything(shop, "people")
    # A mirror made under these settings alone is the expected result.
    shop.sink["path"] = "./fresh"
    shop.run()
    assert found == everything(shop, "people")
    assert [row["id"] for row in found] == [1, 3, 4, 5]


def everything(shop: Shop, table: str) -> list[dict[str, Any]]:
    rows = DeltaTable(str(shop.lake / f"public.{table}")).to_pyarrow_table().drop_columns(["_position"])
    return sorted(rows.to_pylist(), key=lambda row: row["id"])


# ---------------------------------------------------------------------- the target


@pytest.mark.follows("sink_schema_refused")
def test_a_delta_feature_that_a_user_enabled_on_a_mirrors_table(shop: Shop, spark: Any) -> None:
    shop.pg.execute("create table items(id int primary key, n int)")
    shop.pg.execute("insert into items select n, n from generate_series(1, 5) n")
    shop.run()
    table = f"delta.`{shop.lake}/public.items`"
    spark.sql(f"alter table {table} set tblproperties ('delta.enableDeletionVectors' = 'true')")
    shop.pg.execute("alter table items rename n to number")
    shop.pg.execute("alter table items add more int default 7")
    shop.pg.execute("insert into items values (6, 6, 6)")
    error = shop.refused(Kind.SINK_SCHEMA_REFUSED)
    assert "deletionVectors" in error.message
    assert error.hint == "give the sink a new, empty path and let it read the log from its start"
    shop.sink["path"] = "./new lake"
    shop.run()
    shop.require_equal("items")


@pytest.mark.follows("sink_foreign")
def test_tables_without_their_position_file(shop: Shop) -> None:
    shop.pg.execute("create table items(id int primary key, n int)")
    shop.pg.execute("insert into items select n, n from generate_series(1, 5) n")
    shop.run()
    shutil.copytree(shop.lake / "_tailrace", shop.root / "backup")
    shop.pg.execute("delete from items where id = 1")
    shop.run()
    shutil.rmtree(shop.lake / "_tailrace")
    shop.pg.execute("delete from items where id = 2")
    error = shop.refused(Kind.SINK_FOREIGN)
    assert "or move these tables away" in error.hint
    (shop.root / "away").mkdir()
    (shop.lake / "public.items").rename(shop.root / "away" / "public.items")
    shop.run()
    shop.require_equal("items")


# ---------------------------------------------------------------------- slots and logs


@pytest.mark.follows("slot_foreign")
@pytest.mark.parametrize("way", ["dropped", "another name"])
@pytest.mark.parametrize("kind", ["logical", "physical"])
def test_a_slot_that_we_did_not_create(shop: Shop, kind: str, way: str) -> None:
    shop.create_orders()
    slot = shop.section.slot
    plugin = ", 'pgoutput'" if kind == "logical" else ""
    shop.pg.execute(f"select pg_create_{kind}_replication_slot(%s{plugin})", [slot])
    error = shop.refused(Kind.SLOT_FOREIGN)
    found = re.search(r"(SELECT pg_drop_replication_slot\(.*?\));", error.hint)
    assert found is not None
    if way == "dropped":
        shop.pg.execute(found[1])
    else:
        assert "name another one in source.slot, and a new directory in log.path" in error.hint
        shop.source["slot"] = f"{slot}_own"
        shop.log["path"] = "./own log"
    shop.pg.execute("delete from orders where id = 1")
    shop.run()
    shop.require_equal("orders")
    if way != "dropped":
        shop.pg.execute(found[1])


#: Ways to lose changes before the log has them, with the kind of error.
LOST = {
    "slot dropped": Kind.SLOT_MISSING,
    "slot made again": Kind.SLOT_AHEAD_OF_LOG,
    "publication dropped": Kind.PUBLICATION_MISSING,
}


@pytest.mark.follows("slot_missing", "slot_ahead_of_log", "publication_missing")
@pytest.mark.parametrize("case", LOST)
def test_a_log_that_lost_changes_is_replaced_by_a_new_one(shop: Shop, case: str) -> None:
    shop.create_orders()
    shop.run()
    slot = shop.section.slot
    if case == "publication dropped":
        shop.pg.execute(f'drop publication "{shop.section.publication}"')
    else:
        shop.pg.execute("select pg_drop_replication_slot(%s)", [slot])
    shop.pg.execute("delete from orders where id = 1")
    if case == "slot made again":
        shop.pg.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    shop.follow_steps(shop.refused(LOST[case]))
    shop.run()
    shop.require_equal("orders")


@pytest.mark.follows("source_changed", "sink_foreign")
def test_a_log_of_another_database(shop: Shop) -> None:
    shop.create_orders()
    shop.run()
    other = Database(shop.pg.server, f"{shop.pg.name}_2")
    shop.pg.server.create_database(other.name)
    try:
        shop.source["dbname"] = other.name
        other.execute("create table orders(id int primary key, n int); insert into orders values (7, 7)")
        error = shop.refused(Kind.SOURCE_CHANGED)
        assert "set log.path to a new directory" in error.hint
        hint = with_way_out(error, shop.config()).hint
        assert f"(1) mv -- {shop.root / 'log'}" in hint
        assert f"(2) mv -- {shop.lake}" in hint
        shop.log["path"] = "./log 2"
        shop.source["slot"] = "of_the_other"
        error = shop.refused(Kind.SINK_FOREIGN)
        assert "path" in error.hint, error.hint
        shop.sink["path"] = "./lake 2"
        shop.run()
        assert mirrored(shop.lake, "public.orders") == selected(other, "orders")
        other.execute("select pg_drop_replication_slot('of_the_other')")
    finally:
        other.drop()


# ---------------------------------------------------------------------- histories that begin later


def history(shop: Shop, table: str) -> dict[int, Any]:
    """Return the second column of each key's last row in the history."""
    rows = DeltaTable(str(shop.lake / f"public.{table}")).to_pyarrow_table().sort_by("_log_offset")
    first, second = rows.column_names[:2]
    return dict(zip(rows[first].to_pylist(), rows[second].to_pylist(), strict=True))


@pytest.mark.follows("sink_schema_refused", "Start again")
@pytest.mark.slow
def test_a_history_is_begun_in_a_new_path_from_where_the_log_has_the_new_type(shop: Shop) -> None:
    shop.sink["mode"] = "append"
    shop.pg.execute("create table items(id int primary key, what text)")
    shop.pg.execute("insert into items select n, repeat('x', n) from generate_series(1, 5) n")
    shop.run()
    shop.pg.execute("insert into items values (6, 'six')")
    shop.pg.execute("alter table items alter what type int using length(what)")
    shop.pg.execute(
        "begin; update items set what = 10 where id <= 3; insert into items values (7, 7); commit"
    )
    hint = shop.refused(Kind.SINK_SCHEMA_REFUSED).hint
    way = "give the sink a new, empty path and let it begin where the log has the new type"
    assert f"{way} (`tailrace log schemas`, `tailrace replay --from`)" in hint
    shop.sink["path"] = "./new lake"
    shown = json.loads(shop.tailrace(f"tailrace log schemas {shlex.quote(str(shop.root / 'log'))} --json"))
    shop.tailrace(f"tailrace replay FILE --sink lake --from {shown['schemas'][-1]['log_offset']}")
    shop.pg.execute("update items set what = 11 where id = 4")
    shop.run()
    assert history(shop, "items") == dict(
        shop.pg.query("select id, what from items where id in (1, 2, 3, 4, 7)")
    )


@pytest.mark.follows("log_range_gone")
@pytest.mark.slow
def test_a_history_is_begun_where_a_log_without_its_start_begins(shop: Shop) -> None:
    shop.sink["mode"] = "append"
    shop.create_orders()
    for n in range(6, 9):
        shop.capture()
        shop.pg.execute("insert into orders values (%s, %s)", [n, n])
    shop.capture()
    log = LogDirectory.open(shop.root / "log")
    apply(log, "0", RetentionRules(size_bytes=1))
    said = shop.tailrace("tailrace run FILE --until-caught-up", status=1)
    assert "log_range_gone" in said
    found = re.search(r"in a new or emptied target: `(tailrace replay .*?)`", said)
    assert found is not None
    shop.tailrace(found[1])
    shop.pg.execute("update orders set n = 0 where id = 1")
    shop.run()
    ids = history(shop, "orders")
    assert {1, 8} <= set(ids)
    assert ids == dict(shop.pg.query("select id, n from orders where id = any(%s)", [list(ids)]))
