"""Follows the hints of errors about settings, commands and positions, as they are printed."""

from __future__ import annotations

import json
import re
import shutil
from typing import Any

import pytest

from tailrace import Engine
from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.changelog.retention.readers import Readers
from tailrace.errors import Kind, TailraceError
from tailrace.protocol.facts import ColumnFacts
from tailrace.sources.postgres.schema import relation_messages
from tests.support.converters.avro import decoded
from tests.support.converters.registry import FakeRegistry
from tests.support.pipeline.shop import Shop
from tests.support.sinks.mirrored import mirrored

MIB = 1 << 20


# ---------------------------------------------------------------------- secrets


@pytest.mark.follows("secret_missing")
def test_a_variable_that_is_not_set_is_set(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.create_orders()
    shop.source["password"] = "${env:SHOPS_PASSWORD}"
    error = shop.refused(Kind.SECRET_MISSING)
    found = re.search(r"set it before the command, for example: export (\w+)=…", error.hint)
    assert found is not None
    monkeypatch.setenv(found[1], "any: the server trusts")
    shop.run()
    shop.require_equal("orders")


@pytest.mark.follows("secret_missing")
def test_a_missing_or_too_large_file_is_written(shop: Shop) -> None:
    shop.create_orders()
    secret = shop.root / "secret"
    shop.source["password"] = f"${{file:{secret}}}"
    assert "check that the file exists" in shop.refused(Kind.SECRET_MISSING).hint
    secret.write_bytes(bytes(2 * MIB))
    assert "must hold the secret and nothing else" in shop.refused(Kind.SECRET_MISSING).hint
    secret.write_text("any: the server trusts\n")
    shop.run()
    shop.require_equal("orders")


# ---------------------------------------------------------------------- positions in the log


@pytest.mark.follows("log_missing")
def test_a_missing_log_exists_after_the_first_run(shop: Shop) -> None:
    shop.create_orders()
    path = shop.config().log.path
    refused = shop.command(f"tailrace log show {path}", status=1)
    assert "log_missing" in refused
    assert "a log is created when its pipeline first runs" in " ".join(refused.split())
    shop.run()
    assert len(shop.command(f"tailrace log show {path} --json").splitlines()) == 5


@pytest.mark.follows("log_missing")
def test_a_missing_task_is_replaced_by_an_existing_one(shop: Shop) -> None:
    shop.create_orders()
    shop.run()
    path = shop.config().log.path
    refused = shop.command(f"tailrace log show {path} --task 7", status=1)
    found = re.search(r"it has: (\w+)", refused)
    assert found is not None, refused
    assert len(shop.command(f"tailrace log show {path} --task {found[1]} --json").splitlines()) == 5


@pytest.mark.follows("log_range_invalid")
def test_a_position_beyond_the_log_is_replaced_by_one_that_ls_shows(shop: Shop) -> None:
    shop.create_orders()
    shop.run()
    path = shop.config().log.path
    refused = shop.command(f"tailrace log show {path} --from 99999999", status=1)
    assert "log_range_invalid" in refused
    assert "`tailrace log ls` shows its contents" in refused
    (task,) = json.loads(shop.command(f"tailrace log ls {path} --json"))["tasks"]
    shown = shop.command(f"tailrace log show {path} --from {task['start']} --to {task['end']} --json")
    assert len(shown.splitlines()) == 5


@pytest.mark.follows("log_range_invalid")
def test_a_missing_reader_is_replaced_by_an_existing_one(shop: Shop) -> None:
    shop.create_orders()
    shop.capture()
    path = shop.config().log.path
    with LogReader.open(path, "0") as reader:
        Readers(LogDirectory.open(path)).register("lake", {"0": reader.start})
    refused = shop.command(f"tailrace log forget {path} --reader laek", status=1)
    found = re.search(r"its readers are: '(\w+)'", refused)
    assert found is not None, refused
    assert "forgot reader lake" in shop.command(f"tailrace log forget {path} --reader {found[1]}")


@pytest.mark.follows("sink_ahead_of_log")
@pytest.mark.slow
def test_a_log_restored_from_an_older_copy(shop: Shop) -> None:
    shop.create_orders()
    shop.run()
    log = shop.config().log.path
    before = mirrored(shop.lake, "public.orders")
    shutil.copytree(log, shop.root / "older")
    shop.pg.execute("delete from orders where id = 1")
    shop.run()
    log.rename(shop.root / "newer")
    (shop.root / "older").rename(log)
    said = " ".join(shop.tailrace("tailrace replay FILE --sink lake", status=1).split())
    assert "sink_ahead_of_log" in said
    assert "restore the newer log, or give the sink a new, empty path" in said
    shop.sink["path"] = "./new lake"
    shop.tailrace("tailrace replay FILE --sink lake")
    assert mirrored(shop.lake, "public.orders") == before
    shop.sink["path"] = "./lake"
    shutil.rmtree(log)
    (shop.root / "newer").rename(log)
    shop.pg.execute("delete from orders where id = 2")
    shop.run()
    shop.require_equal("orders")


# ---------------------------------------------------------------------- values, large rows


@pytest.mark.follows("frame_too_large")
@pytest.mark.parametrize("when", ["snapshot", "stream"])
def test_a_row_larger_than_the_limit_of_messages(shop: Shop, when: str) -> None:
    shop.pg.execute("create table notes(id int primary key, body text)")
    shop.source["frame_bytes_max"] = MIB
    if when == "stream":
        shop.run()
    shop.pg.execute("insert into notes values (1, repeat('x', 2 << 20)), (2, 'y')")
    found = re.search(r"raise source\.(\w+), if there is memory", shop.refused(Kind.FRAME_TOO_LARGE).hint)
    assert found is not None
    shop.source[found[1]] = 8 * MIB
    shop.run()
    shop.require_equal("notes")


@pytest.mark.follows("conversion_failed")
@pytest.mark.parametrize("way", ["as text", "left out"])
def test_a_date_that_avro_cannot_represent(shop: Shop, way: str) -> None:
    shop.pg.execute("create table days(id int primary key, day date)")
    shop.pg.execute("insert into days values (1, '2026-01-02'), (2, 'infinity')")
    got: list[Any] = []

    def run() -> None:
        source = {"type": "postgresql", **shop.source}
        given = {"name": "shop", "source": source, "log": {"path": str(shop.root / "log")}}
        options = {"converter": {"type": "avro", "registry_url": registry.url}}
        Engine(given, settings={"until_caught_up": True}, options=options, on_record=got.append).run()

    with FakeRegistry() as registry:
        with pytest.raises(TailraceError) as raised:
            run()
        assert raised.value.kind is Kind.CONVERSION_FAILED
        found = re.search(r"(time_precision_mode): (isostring)\), or exclude the column", raised.value.hint)
        assert found is not None
        got.clear()
        if way == "as text":
            shop.source[found[1]] = found[2]
        else:
            shop.source["columns_exclude"] = ["public.days.day"]
        registry.level = "NONE"  # the column's type changes, or the column is excluded
        run()
        rows = [
            decoded(event.value, registry.schema(int.from_bytes(event.value[1:5], "big"))) for event in got
        ]
    assert [row["after"]["id"] for row in rows] == [1, 2]
    if way == "as text":
        assert [row["after"]["day"] for row in rows] == ["2026-01-02Z", "infinity"]


# ---------------------------------------------------------------------- tables and snapshots


@pytest.mark.follows("table_missing")
@pytest.mark.parametrize("way", ["created", "corrected"])
@pytest.mark.parametrize("named", [["public.orders", "public.more"], ["public.more"]])
def test_a_missing_table(shop: Shop, way: str, named: list[str]) -> None:
    shop.create_orders()
    shop.source["tables"] = named
    hint = shop.refused(Kind.TABLE_MISSING).hint
    assert re.search(r"create the tables? first, or correct source.tables", hint)
    if way == "created":
        shop.pg.execute("create table more(id int primary key); insert into more values (1)")
    else:
        shop.source["tables"] = ["public.orders"]
    shop.run()
    shop.require_equal("more" if way == "created" else "orders")


@pytest.mark.follows("snapshot_failed")
def test_an_invalid_condition_is_corrected(shop: Shop) -> None:
    shop.create_orders()
    shop.source["snapshot_where"] = {"public.orders": "no_such > 1"}
    assert "correct the condition and try again" in shop.refused(Kind.SNAPSHOT_FAILED).hint
    shop.source["snapshot_where"] = {"public.orders": "id >= 1"}
    shop.run()
    shop.require_equal("orders")


@pytest.mark.follows("column_not_sent")
def test_a_column_that_the_stream_lacks_is_in_a_new_log(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """No supported server loses a column, so the detection is patched to report one."""
    shop.create_orders()
    shop.run()
    shop.pg.execute("alter table orders add more int default 5")
    shop.pg.execute("insert into orders values (6, 6, 6)")
    with monkeypatch.context() as patched:
        patched.setattr(relation_messages, "missing_columns", lambda *_, **__: (ColumnFacts("more", 3),))
        error = shop.refused(Kind.COLUMN_NOT_SENT)
    assert "begin a new log with a new snapshot" in error.hint
    shop.follow_steps(error)
    shop.run()
    shop.require_equal("orders")
