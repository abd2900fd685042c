"""A keyspace of two shards through `tailrace run` into every kind of sink that needs no server."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tailrace.sources.vitess.resharding.gtid_sets import GtidSet
from tailrace_servers.vitess import EmbeddedVitess
from tests.support.vitess.cluster import rows_of
from tests.support.vitess.end_to_end import lines_of, pipeline_file, tailrace

pytestmark = [pytest.mark.vitess, pytest.mark.ci]

#: Each shard makes at least one append; the number of fsyncs and the duration of a commit depend on the disk.
KILLS = (
    "capture.before_append=kill@2",
    "capture.after_append=kill@2",
    "log.before_fsync=kill",
    "log.after_fsync=kill",
    "sink.before_commit=kill",
)


def test_every_target_has_each_change_once_after_kills_anywhere(
    tmp_path: Path, vitess: EmbeddedVitess, orders: str
) -> None:
    file = pipeline_file(tmp_path, vitess, orders, snapshot="never")
    assert "ready" in tailrace("check", file)
    tailrace("run", file, "--until-caught-up")  # from here on changes are captured
    expected: Counter[str] = Counter()
    number = 0
    for kill in (*KILLS, ""):
        for _ in range(20):
            number += 1
            vitess.execute(f"insert into {orders} (id, what, amount) values ({number}, 'ä\\t{number}', 1.50)")
            expected["c"] += 1
            if number % 2 == 0:
                vitess.execute(f"update {orders} set counter = counter + 1 where id = {number // 2}")
                expected["u"] += number // 2 % 5 != 4  # those are deleted
            if number % 5 == 0:
                vitess.execute(f"delete from {orders} where id = {number - 1}")
                expected["d"] += 1
        tailrace("run", file, "--until-caught-up", failpoints=kill, status=-9 if kill else 0)
    lines = lines_of(tmp_path, orders)
    assert Counter(line["op"] for line in lines) == expected
    gtids: dict[str, list[str]] = {}
    for line in sorted(lines, key=lambda each: each["position"]["log_offset"]):
        [position] = json.loads(line["source"]["vgtid"])
        assert (position["keyspace"], position["shard"]) == (vitess.keyspace, line["source"]["shard"])
        gtids.setdefault(position["shard"], []).append(position["gtid"])
    assert set(gtids) == {"-80", "80-"}
    for found in gtids.values():
        # Each transaction has one row and its own position, as the server reports it.
        assert len(set(found)) == len(found)
        assert all(GtidSet.parse(later).contains(GtidSet.parse(each)) for each, later in pairwise(found))
    counters: dict[int, list[int]] = {}
    for line in lines:
        if line["after"] is not None:
            counters.setdefault(line["after"]["id"], []).append(line["after"]["counter"])
    assert all(found == list(range(len(found))) for found in counters.values())
    mirrored = {
        row["id"]: (row["what"], str(row["amount"]), row["counter"])
        for row in DeltaTable(str(tmp_path / "mirror" / f"shop.{orders}")).to_pyarrow_table().to_pylist()
    }
    assert mirrored == {key: (row[1], str(row[2]), row[3]) for key, row in rows_of(vitess, orders).items()}
    assert "sound" in tailrace("log", "verify", tmp_path / "log")
    shown = tailrace("log", "show", tmp_path / "log", "--limit", "1")
    assert "shard=" in shown
    assert f" insert {vitess.keyspace}.{orders} " in shown
