"""A slot that the server invalidated: it has a state of its own, and following the hint helps."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tailrace_servers.postgres import EmbeddedPostgres
from tests.support.wait import wait_until

SLOT = "tailrace_shop"


def tailrace(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tailrace", *words], capture_output=True, text=True, check=False, timeout=240
    )


def status(file: Path) -> dict:
    return json.loads(tailrace("status", str(file), "--json").stdout)


def lose(server: EmbeddedPostgres) -> None:
    server.execute("alter system set max_slot_wal_keep_size = '1MB'")
    server.execute("select pg_reload_conf()")

    def lost() -> bool:
        server.execute("insert into others select generate_series(1, 20000)")
        server.execute("select pg_switch_wal()")
        server.execute("checkpoint")
        return server.query("select wal_status from pg_replication_slots where slot_name = %s", [SLOT]) == [
            ("lost",)
        ]

    wait_until(lost, 60, "the slot to be lost")


@pytest.mark.follows("slot_invalidated")
@pytest.mark.each_postgres("what the server says of slots")
def test_following_the_hint_after_a_lost_slot_helps(own_pg: EmbeddedPostgres, tmp_path: Path) -> None:
    server = own_pg
    server.execute("create table items(id int primary key); create table others(id int)")
    server.execute("insert into items select generate_series(1, 10)")
    root = tmp_path / "it's here"  # a path that needs quoting in a shell
    root.mkdir()
    file = root / "shop.yaml"
    source = {"host": "127.0.0.1", "port": server.port, "user": "postgres", "dbname": "postgres"}
    content = {"name": "shop", "source": {**source, "tables": ["public.items"]}, "log": {"path": "log"}}
    file.write_text(yaml.safe_dump(content))
    # GIVEN a pipeline that is stopped while its slot is lost
    assert tailrace("run", str(file), "--until-caught-up").returncode == 0
    server.execute("insert into items select generate_series(11, 20)")
    lose(server)
    # THEN `status` reports it even before anything ran again, and so does `check`
    told = status(file)
    assert (told["state"], told["error"]["kind"]) == ("needs_snapshot", "slot_invalidated")
    assert told["tasks"][0]["slot"]["invalidation_reason"] == "wal_removed"
    assert tailrace("check", str(file)).returncode == 1
    # AND `run` ends at once with the reason, at each attempt; nothing was changed
    for _ in range(2):
        failed = tailrace("run", str(file), "--until-caught-up")
        assert failed.returncode == 1
        assert "slot_invalidated" in failed.stderr
        assert "wal_removed" in failed.stderr
        told = status(file)
        assert told["state"] == "needs_snapshot"
    assert server.query("select count(*) from pg_replication_slots") == [(1,)]
    # WHEN the hint is followed exactly
    hint = told["error"]["hint"]
    steps = [step.strip() for step in re.split(r"\(\d\) ", hint.partition("Run: ")[2]) if step.strip()]
    assert len(steps) == 3
    server.execute(steps[0].removeprefix("in the database: "))
    subprocess.run(steps[1], shell=True, check=True)  # noqa: S602 - a person would type it
    assert "tailrace run" in steps[2]
    for statement in re.findall(r"(ALTER SYSTEM[^;]*;|SELECT pg_reload_conf\(\);)", hint):
        server.execute(statement)
    # THEN the pipeline goes on, with all rows in a new log, and the old log still exists
    again = tailrace("run", str(file), "--until-caught-up")
    assert again.returncode == 0, again.stderr
    assert status(file)["state"] == "stopped"
    shown = tailrace("log", "show", str(root / "log"), "--json").stdout.splitlines()
    assert sorted(json.loads(line)["after"]["id"] for line in shown) == list(range(1, 21))
    assert (root / "log.before").is_dir()
    assert server.query("show max_slot_wal_keep_size") == [("64GB",)]


def test_status_reports_a_dropped_slot_before_the_next_run(own_pg: EmbeddedPostgres, tmp_path: Path) -> None:
    own_pg.execute("create table items(id int primary key)")
    own_pg.create_database("other")
    file = tmp_path / "shop.yaml"
    source = {"host": "127.0.0.1", "port": own_pg.port, "user": "postgres", "dbname": "postgres"}
    content = {"name": "shop", "source": source, "log": {"path": "log"}}
    file.write_text(yaml.safe_dump(content))
    assert tailrace("run", str(file), "--until-caught-up").returncode == 0
    own_pg.execute("select pg_drop_replication_slot(%s)", [SLOT])
    found = status(file)
    assert (found["state"], found["error"]["kind"]) == ("needs_snapshot", "slot_missing")
    assert "(1) mv" in found["error"]["hint"]
    # The log's slot is not missing in another database.
    source["dbname"] = "other"
    file.write_text(yaml.safe_dump(content))
    assert status(file)["error"] is None


def captured(server: EmbeddedPostgres, root: Path, **source: object) -> Path:
    """Return the file of a pipeline that captured a table, and was stopped before the last row."""
    server.execute("create table items(id int primary key); insert into items values (1)")
    file = root / "shop.yaml"
    source = {"dsn": server.dsn(), "tables": ["public.items"], **source}
    file.write_text(yaml.safe_dump({"name": "shop", "source": source, "log": {"path": "log"}}))
    assert tailrace("run", str(file), "--until-caught-up").returncode == 0
    server.execute("insert into items values (2)")
    return file


@pytest.mark.each_postgres("what the server says of a missing file")
def test_a_missing_file_of_the_server_that_is_no_wal_does_not_lose_the_slot(
    own_pg: EmbeddedPostgres, tmp_path: Path
) -> None:
    """As while the server's package is replaced. The hint said to drop the slot and to move the log away."""
    file = captured(own_pg, tmp_path, reconnect_s_max=1)
    own_pg.execute("alter system set dynamic_library_path = '/nowhere'")
    own_pg.restart()
    failed = tailrace("run", str(file), "--until-caught-up")
    assert failed.returncode == 1
    assert "source_unreachable: start replication" in failed.stderr
    assert 'could not access file "pgoutput"' in failed.stderr
    assert status(file)["state"] != "needs_snapshot"
    own_pg.execute("alter system reset dynamic_library_path")
    own_pg.restart()
    assert tailrace("run", str(file), "--until-caught-up").returncode == 0
    assert tailrace("log", "show", str(tmp_path / "log"), "--json").stdout.count('"op"') == 2


@pytest.mark.each_postgres("what the server says of a missing file")
def test_a_missing_file_of_wal_loses_the_slot(own_pg: EmbeddedPostgres, tmp_path: Path) -> None:
    file = captured(own_pg, tmp_path, reconnect_s_max=1)
    [(name,)] = own_pg.query("select pg_walfile_name(restart_lsn) from pg_replication_slots")
    own_pg.execute("select pg_switch_wal()")
    own_pg.execute("checkpoint")
    (own_pg.data / "pg_wal" / name).unlink()
    failed = tailrace("run", str(file), "--until-caught-up")
    assert failed.returncode == 1
    assert "slot_invalidated" in failed.stderr
    assert "has already been removed" in failed.stderr
    assert status(file)["state"] == "needs_snapshot"
