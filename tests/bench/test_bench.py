"""The benchmarks run, count every row, and answer in their documented form. Not how fast."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tailrace import bench
from tailrace.bench.report import Result
from tailrace.cli.main import app

FIELDS = {"name", "value", "unit", "ratio", "reference", "limit", "setup"}


@pytest.mark.parametrize("name", ["capture", "watches", "snapshot", "decode"])
def test_a_benchmark_prints_one_document(name: str) -> None:
    result = CliRunner().invoke(app, ["bench", name, "--rows", "3000", "--json"])
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


def test_a_person_gets_value_ratio_and_limit(capsys: pytest.CaptureFixture[str]) -> None:
    Result("x", 1234.5, "rows/s", 1.25, "the peer", "the disk", {"cores": 2}).print(as_json=False)
    printed = capsys.readouterr().out
    assert "1,234 rows/s, 1.25 × the peer" in printed
    assert "limit: the disk" in printed
