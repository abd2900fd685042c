"""Preflight of slots and WAL senders for all sources that are on one server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tailrace.config import load_engine
from tailrace.errors import Kind
from tailrace.pipeline.preflight.preflight import preflight
from tailrace.pipeline.run import Run
from tailrace.sources.findings import Finding, Severity
from tailrace.sources.postgres.preflight.capacity import SourceCapacity, room_findings
from tailrace_servers.postgres import EmbeddedPostgres
from tests.support.wait import wait_until

pytestmark = pytest.mark.each_postgres("what the server says of its slots")


def room(source, server="a", *, slot=True, sender=True, slots=8, senders=8, windows=0, windows_open=0):
    return SourceCapacity(source, server, slot, slots, 10, sender, senders, 10, windows, windows_open)


@pytest.mark.parametrize(
    ("rooms", "told", "needing"),
    [
        ([room("")], "", ""),
        ([room("eu"), room("us")], "", ""),
        ([room("eu"), room("us"), room("asia", "b")], "", ""),
        ([room("eu"), room("us"), room("asia", slot=False, sender=False)], "", ""),
        (
            [room("", slots=10)],
            "no replication slot is free: 10 of 10 (max_replication_slots) are in use",
            "",
        ),
        (
            [room("eu", senders=9), room("us", senders=9), room("asia", "b", senders=9)],
            "only 1 WAL sender free: 9 of 10 (max_wal_senders) are in use",
            "2 sources on this server need one each: eu, us",
        ),
        (
            [room("eu", sender=False), room("us", sender=False), room("asia", sender=False)],
            "only 2 replication slots free: 8 of 10 (max_replication_slots) are in use",
            "3 sources on this server need one each: eu, us, asia",
        ),
    ],
)
def test_the_needs_of_the_sources_of_one_server_are_added_up(rooms, told, needing):
    messages = [finding.message for finding in room_findings(rooms)]
    assert messages == (["; ".join(filter(None, (told, needing)))] if told else [])


WINDOW = "an interrupted or requested snapshot needs one more"


@pytest.mark.parametrize(
    ("rooms", "told"),
    [
        ([room("", windows=1)], []),
        ([room("", slots=9, windows=1)], ["no replication slot is free for snapshots"]),
        ([room("", slot=False, slots=10, windows=1, windows_open=1)], []),
        ([room("", senders=9, windows=1)], ["no WAL sender is free for snapshots"]),
        (
            [room("eu", slots=7, windows=1), room("us", slots=7, senders=7, windows=1)],
            ["only 1 replication slot free for snapshots", "only 1 WAL sender free for snapshots"],
        ),
    ],
)
def test_a_snapshot_beside_the_stream_needs_one_more_slot_and_wal_sender(rooms, told):
    found = list(room_findings(rooms))
    assert [finding.message.partition(" (")[0] for finding in found] == told
    for finding in found:
        assert WINDOW in finding.message
        assert finding.severity is Severity.WARNING
        assert ("eu, us" in finding.message) == (len(rooms) > 1)


def test_three_databases_need_three_of_the_two_slots_of_their_server(
    make_server: Callable[..., EmbeddedPostgres], tmp_path: Path
) -> None:
    server = make_server(max_replication_slots="2", max_wal_senders="2")

    def errors(file: Path) -> list[Finding]:
        # The server's last WAL sender may still be in use by an earlier, ended check.
        wait_until(lambda: not server.query("select 1 from pg_stat_replication"), 60)
        found = [finding for finding in preflight(file) if finding.severity is Severity.ERROR]
        return [finding for finding in found if finding.kind is not Kind.SOURCE_UNREACHABLE]

    for name in ("eu", "us", "asia"):
        server.create_database(name)
        server.execute("create table t (id int primary key)", dbname=name)

    def written(*names: str) -> Path:
        sources = [
            {"name": name, "host": "127.0.0.1", "port": server.port, "user": "postgres", "dbname": name}
            for name in names
        ]
        file = tmp_path / "shop.yaml"
        file.write_text(yaml.safe_dump({"name": "shop", "sources": sources, "log": {"path": "logs"}}))
        return file

    assert errors(written("eu", "us")) == []
    beside = preflight(written("eu", "us"))
    assert [WINDOW in finding.message for finding in beside] == [True, True]
    # A captured database has its slot already; the two that are not captured need one each.
    Run(load_engine(written("eu")), until_caught_up=True).run()
    assert errors(written("eu", "us")) == []
    found = errors(written("eu", "us", "asia"))
    assert {(each.kind, each.severity) for each in found} == {(Kind.SOURCE_MISCONFIGURED, Severity.ERROR)}
    slots, senders = found
    assert "only 1 replication slot free" in slots.message
    assert slots.message.endswith("2 sources on this server need one each: us, asia")
    assert senders.message.endswith("3 sources on this server need one each: eu, us, asia")
    # The suggested repair works.
    for finding in found:
        server.execute(finding.repair.partition(";")[0])
    server.stop()
    server.start()
    assert preflight(written("eu", "us", "asia")) == []
