"""The benchmarks run, count every row, and print the documented form. Their speed is not tested."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import tailrace_bench as bench
from tailrace.cli.main import app
from tailrace_bench import (
    capture,
    convert,
    decode,
    idle,
    kafka,
    kafka_transactions,
    realtime,
    records,
    snapshot,
    stages,
    subscriptions,
    transforms,
    vitess_rows,
)
from tailrace_bench.support import topics
from tailrace_bench.support.report import Result, median_interval
from tailrace_servers.kafka import QUICK_JVM

FIELDS = {"name", "value", "unit", "ratio", "reference", "limit", "setup"}


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        *((name, 3000) for name in ("capture", "snapshot", "decode", "convert", "transforms")),
        ("vitess_rows", 3000),
        *((name, 3000) for name in ("stages", "engine", "records", "kafka")),
        ("kafka_transactions", 50),
        ("realtime", 500),
        ("subscriptions", 500),
        ("idle", 3),
        ("tables", 20),
    ],
)
@pytest.mark.ci
def test_a_benchmark_prints_one_document(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka, "PASSES", 1)
    monkeypatch.setattr(kafka_transactions, "PAIRS", 1)
    monkeypatch.setattr(records, "PASSES", 1)
    # One turn runs completely, on servers with settings for a quick start, not for speed.
    for module in (capture, convert, decode, snapshot, stages, transforms, vitess_rows):
        monkeypatch.setattr(module, "TURNS", 1)
    monkeypatch.setattr(topics, "SERVER_JVM", QUICK_JVM)
    monkeypatch.setenv("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1")  # of the peers
    monkeypatch.setattr(idle, "WATCHED_S", 0.2)
    monkeypatch.setattr(realtime, "PEER_LONGER_S", 3.0)
    monkeypatch.setattr(realtime, "TURNS", 1)
    for name_of_time in ("WARM_UP_S", "MEASURED_S"):
        monkeypatch.setattr(realtime, name_of_time, 1.0)
        monkeypatch.setattr(subscriptions, name_of_time, 1.0)
    monkeypatch.setattr(subscriptions, "SUBSCRIBERS", 20)
    result = CliRunner().invoke(app, ["bench", name, "--rows", str(rows), "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert set(document) >= FIELDS
    assert document["name"] == name
    assert document["value"] > 0
    assert (document["ratio"] is not None) == bool(document["reference"])


def test_an_unknown_benchmark_is_bad_usage() -> None:
    assert CliRunner().invoke(app, ["bench", "nothing"]).exit_code == 2


def test_every_benchmark_has_its_module() -> None:
    for name in bench.NAMES:
        assert callable(bench.measurement(name))


def test_the_readable_form_has_value_ratio_and_limit(capsys: pytest.CaptureFixture[str]) -> None:
    Result("x", 1234.5, "rows/s", 1.25, "the peer", "the disk", {"cores": 2}).print(as_json=False)
    printed = capsys.readouterr().out
    assert "1,234 rows/s, 1.25 × the peer" in printed
    assert "limit: the disk" in printed


@pytest.mark.parametrize(
    ("count", "interval"),
    # 95 % intervals of the median, from tables of the sign test
    [(1, (1, 1)), (2, (1, 2)), (5, (1, 5)), (6, (1, 6)), (9, (2, 8)), (20, (6, 15)), (40, (14, 27))],
)
def test_the_interval_of_a_median_is_that_of_the_sign_test(count: int, interval: tuple[int, int]) -> None:
    values = [float(value) for value in range(count, 0, -1)]
    assert median_interval(values) == interval
