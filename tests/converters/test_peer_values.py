"""Compares random values under every handling mode with Debezium's engine on the same database.

A failure prints the seed; `TAILRACE_SEEDS=7,8 pytest tests/converters/test_peer_values.py` runs others.
"""

from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from psycopg import sql

from tailrace.changelog.reader import LogReader
from tailrace.converters.debezium import JsonConverter
from tailrace.model import ValueModes
from tailrace.ranges import plan
from tailrace.ranges.changes import decoded_batches
from tailrace.records.group import Group
from tailrace_bench.support import debezium
from tests.support.capture.captured import capturing
from tests.support.converters.peer_values import ITEMS, MODES, VALUES, row
from tests.support.debezium import require_debezium
from tests.support.postgres import Database

SEEDS = [int(seed) for seed in os.environ.get("TAILRACE_SEEDS", "1").split(",")]
ROWS = 30
TYPES = [*VALUES, *(f"{item}[]" for item in ITEMS)]
NAMES = [f"c{number:02}" for number in range(len(TYPES))]
LAST = "last_of_all"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.timeout(900)
@pytest.mark.ci
def test_random_values_equal_debeziums(pg: Database, tmp_path: Path, seed: int) -> None:
    require_debezium()
    columns = ", ".join(f"{name} {kind}" for name, kind in zip(NAMES, TYPES, strict=True))
    pg.execute(f"create table t (id int primary key, {columns})")
    pg.execute(f"create table {LAST} (id int primary key)")
    pg.execute("create publication p for all tables")
    for mode in MODES:
        pg.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [f"{mode}_{pg.name}"])
    log = tmp_path / "log"
    with capturing(pg.dsn, log, tables=("public.*",), publication="p", snapshot="never") as running:
        running.wait_for("streaming", 120)
        fill(pg, random.Random(seed))
        running.catch_up(pg.query, 120)
    texts = dict(pg.query(f"select id, to_jsonb(array[{', '.join(f'{n}::text' for n in NAMES)}]) from t"))
    for mode, (ours, theirs) in MODES.items():
        mine, others = rows(events(log, ours)), rows(peer_events(pg, mode, theirs, tmp_path))
        assert set(mine) == set(others) == set(range(ROWS))
        for number, name, kind in ((r, n, k) for r in mine for n, k in zip(NAMES, TYPES, strict=True)):
            text = texts[number][NAMES.index(name)]
            found, wanted = same(kind, mine[number][name]), same(kind, others[number][name])
            assert found == wanted, (seed, mode, kind, text)


def fill(pg: Database, rng: random.Random) -> None:
    with pg.connect() as connection:
        for number in range(ROWS):
            values = sql.SQL(", ").join(map(sql.Literal, (number, *row(rng))))
            connection.execute(sql.SQL("insert into t values ({})").format(values))
    pg.execute(f"insert into {LAST} values (1)")


def events(log: Path, modes: ValueModes) -> list[str]:
    found: list[str] = []
    with LogReader.open(log, "0") as reader:
        start, end = reader.start, reader.end().offset
        splits = plan.input_splits("0", reader.blocks(start, end), start, end)
    for split in splits:
        for decoded in decoded_batches(log, split, ["public.t"], modes):
            for changes in decoded.changes:
                group = Group.of_changes("public.t", np.arange(changes.count), changes)
                found += JsonConverter().convert(group).values.to_pylist()
    return found


def peer_events(pg: Database, mode: str, settings: dict[str, str], directory: Path) -> list[str]:
    given = {
        "database.dbname": pg.name, "publication.name": "p", "table.include.list": "public.*",
        "key.converter.schemas.enable": "false", "value.converter.schemas.enable": "false",
        "converter.schemas.enable": "false", **settings,
    }  # fmt: skip
    last = f"peer.public.{LAST}"
    found = debezium.events(pg.server, f"{mode}_{pg.name}", last, given, directory)
    return [event.value for event in found if event.topic != last and event.value is not None]


def rows(values: list[str]) -> dict[int, dict[str, Any]]:
    found = [json.loads(value)["after"] for value in values]
    return {after["id"]: after for after in found}


def same(kind: str, value: Any) -> Any:
    # Java before 19 writes more digits than a float has.
    if kind == "real" and value is not None:
        return struct.pack("f", value)
    if kind == "interval" and isinstance(value, int):
        return round(value / 1000)  # Debezium computes with floating-point numbers
    return repr(value)
