"""Spark's JVM is killed under a pipeline: capture goes on, Spark is started again, nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Callable

import psutil
import pytest

from tests.support.postgres import Database
from tests.support.torture.harness import Life, Round
from tests.support.wait import wait_until


@pytest.mark.torture
@pytest.mark.timeout(600)
def test_sinks_go_on_with_a_new_jvm(pg: Database, make_round: Callable[..., Round]) -> None:
    round_ = make_round(pg, "parquet", "mirror")
    round_.launcher = "spark_alone"
    life = round_.live(until_caught_up=False)
    with round_.at_work(transactions=None):
        # GIVEN sinks that are being fed
        before = _positions_beyond(round_, [0, 0])
        # WHEN the JVM that feeds them is killed
        first = _jvm(life)
        first.kill()
        # THEN another one feeds them, in the same process of the engine
        _positions_beyond(round_, before)
        assert _jvm(life).pid != first.pid
    assert not life.is_over, life.last_words()
    assert life.end() == 0, life.last_words()
    assert round_.judge() == []


def _positions_beyond(round_: Round, positions: list[int]) -> list[int]:
    """Wait until each sink has passed its entry of `positions`; return where they are."""
    found: list[int] = []

    def beyond() -> bool:
        status = round_.command("status", str(round_.file), "--json")
        found[:] = [sink["position"] or 0 for sink in json.loads(status.stdout).get("sinks", [])]
        return len(found) == len(positions) and all(
            now > then for now, then in zip(found, positions, strict=True)
        )

    wait_until(beyond, 120)
    return list(found)


def _jvm(life: Life) -> psutil.Process:
    processes = psutil.Process(life.pid).children(recursive=True)
    [jvm] = [process for process in processes if "java" in process.name()]
    return jvm
