"""Logical messages are chosen by their prefix before they come into the log."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailrace.config.source.postgres import PostgresSource
from tailrace.model import parse_lsn
from tailrace.sources.postgres.streaming import frame_filters
from tailrace.sources.postgres.streaming.frame_filters import MessageFilter
from tests.support.capture.captured import CREATE_ITEMS, capturing, read_log
from tests.support.capture.resumed import RUN, life
from tests.support.capture.stream_of import insert, logical_message, transaction
from tests.support.postgres import Database

pytestmark = pytest.mark.each_postgres("logical messages in the stream")

CHOSEN = {"message_prefixes": ("app.*", "/(audit|log)[0-9]+/"), "message_prefixes_exclude": ("app.debug*",)}


def chosen_of(source: PostgresSource, data: bytes) -> bytes:
    return MessageFilter(source).apply(np.frombuffer(data, np.uint8).copy()).tobytes()


def source_with(**options: Any) -> PostgresSource:
    return PostgresSource(dsn="postgresql://u@localhost/d", **options)


@pytest.mark.parametrize("count", [1, frame_filters.PREFIXES_MAX, frame_filters.PREFIXES_MAX + 1, 6400])
@pytest.mark.parametrize("size", [0, 200, frame_filters.PREFIX_BYTES_MAX + 1])
def test_patterns_decide_whatever_the_number_and_length_of_prefixes(count: int, size: int) -> None:
    if size > frame_filters.PREFIX_BYTES_MAX:
        count = min(count, 70)
    source = source_with(message_prefixes=("*1*",), message_prefixes_exclude=("*13*",))
    rng = random.Random(count)
    data, wanted = [], []
    for number in [rng.randrange(count) for _ in range(2 * count)]:
        prefix = f"{number}.{'x' * size}".encode()
        frame = logical_message(5, prefix=prefix)
        data += [frame, insert(1)]
        wanted += [frame if b"1" in prefix and b"13" not in prefix else b"", insert(1)]
    assert chosen_of(source, b"".join(data)) == b"".join(wanted)


def test_without_patterns_all_messages_pass_and_with_an_empty_list_none() -> None:
    data = transaction(5, 6, logical_message(5, transactional=True, prefix=b""), insert(1))
    assert chosen_of(source_with(), data) == data
    assert chosen_of(source_with(message_prefixes=()), data) == transaction(5, 6, insert(1))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"message_prefixes": ["/(/"]}, "no regular expression"),
        ({"message_prefixes_exclude": [""]}, "prefix"),
    ],
)
def test_invalid_patterns_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        source_with(**options)


def emit(pg: Database, prefix: str, *, transactional: bool) -> None:
    pg.execute("select pg_logical_emit_message(%s, %s, %s)", [transactional, prefix, prefix])


def test_prefixes_choose_the_messages_in_the_log(pg: Database, tmp_path: Path) -> None:
    pg.execute(CREATE_ITEMS)
    prefixes = [
        "app.a",
        "app.debug",
        "app.debug.more",
        "audit7",
        "audit",
        "tailrace.heartbeat",
        "käse",
        "log1",
    ]
    with capturing(pg.dsn, tmp_path / "log", **CHOSEN) as running:
        running.wait_for("streaming")
        for prefix in prefixes:
            emit(pg, prefix, transactional=True)
            emit(pg, prefix, transactional=False)
        pg.execute("insert into items values (1, 'x')")
        running.catch_up(pg.query)
    found = read_log(tmp_path / "log")
    assert [each.split(b"\0")[0] for each in found.messages] == [
        name.encode() for name in ("app.a", "audit7", "log1") for _ in range(2)
    ]
    assert found.inserts == [1]


@pytest.mark.one_postgres
@pytest.mark.ci
def test_after_kills_no_message_is_repeated_or_missing(pg: Database, tmp_path: Path) -> None:
    pg.execute("create table items(id int primary key)")
    script = RUN.replace("snapshot_connections=3,", f"snapshot_connections=3, **{CHOSEN},")
    log = tmp_path / "log"
    assert life(pg, log, "", script=script) == 0
    sent = 0
    for point in ("capture.after_append=kill@1", "log.after_fsync=kill@1", ""):
        for _ in range(20):
            emit(pg, f"app.{sent}", transactional=sent % 2 == 0)
            emit(pg, f"app.debug{sent}", transactional=sent % 3 == 0)
            sent += 1
        end = parse_lsn(pg.query("select pg_current_wal_insert_lsn()::text")[0][0])
        pg.execute("select pg_switch_wal()")
        ended = life(pg, log, point, script=script.replace("caught_up(1)", f"caught_up({end})"))
        assert ended == (-9 if point else 0)
    found = read_log(log)
    assert [each.split(b"\0")[0] for each in found.messages] == [f"app.{n}".encode() for n in range(sent)]
