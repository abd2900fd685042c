"""SIGTERM while a Kafka sink's brokers are gone or stopped: the end that `docs/cli.md` promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tailrace_servers.kafka import EmbeddedKafka, find_jars
from tests.support.kafka.folding import _changes
from tests.support.kafka.pipelines import pipeline
from tests.support.kafka.reading import read_topic
from tests.support.postgres import Database
from tests.support.torture.harness import Life
from tests.support.wait import wait_until

TIMEOUT_S = 240.0
#: As in docs/cli.md: for an unfinished batch, and for a job of Spark after it.
BATCH_S, JOB_S = 8.0, 4.0
#: Timeout of the end of Spark, which may be just starting.
SPARK_S = 10.0
#: For the end of the process while other tests run.
MARGIN_S = 6.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmbeddedKafka]:
    """A broker that is killed and started again."""
    with EmbeddedKafka(find_jars()) as made:
        yield made


def _command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tailrace", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)


def _sink(file: Path, life: Life) -> dict[str, Any]:
    assert not life.is_over, life.last_words()
    sinks: list[dict[str, Any]] = json.loads(_command("status", file, "--json").stdout).get("sinks") or [{}]
    return sinks[0]


def _live(file: Path, output: Path) -> Life:
    command = [sys.executable, "-m", "tailrace", "run", str(file)]
    passed = {"TAILRACE_FAILPOINTS_LOG": f"{output}.passed"}
    return Life(command, {**os.environ, "PYTHONUNBUFFERED": "1", **passed}, output)


def _ranges_begun(output: Path) -> int:
    return Path(f"{output}.passed").read_text().split().count("sink.before_write")


def _asks(life: Life, cluster: EmbeddedKafka) -> bool:
    """Return whether the sink has begun to ask its broker."""
    assert not life.is_over, life.last_words()
    if "kafka client" in life.last_words():  # it is refused
        return True
    port = int(cluster.bootstrap.rpartition(":")[2])
    connections = psutil.Process(life.pid).net_connections("tcp")
    return any(each.raddr and each.raddr.port == port for each in connections)


def _end_in_time(life: Life, limit_s: float) -> None:
    began_s = time.monotonic()
    assert life.end() == 0, life.last_words()
    assert time.monotonic() - began_s < limit_s + MARGIN_S, life.last_words()
    words = life.last_words()
    assert "stopping; a second signal ends at once" in words
    assert "a sink did not finish its batch in time: it is written again at the next start" in words
    assert "pipeline state='stopped'" in words
    assert "error:" not in words
    assert "Traceback" not in words


@pytest.mark.ci
@pytest.mark.parametrize(
    ("outage", "runs_on", "atomic"),
    [
        ("killed", "process", True),
        ("still", "process", True),
        ("still", "process", False),
        ("still", "spark", True),
    ],
)
def test_a_run_whose_brokers_are_gone_or_stopped_ends_in_time(
    pg: Database, cluster: EmbeddedKafka, tmp_path: Path, outage: str, runs_on: str, *, atomic: bool
) -> None:
    file = pipeline(
        tmp_path, pg, cluster, atomic_source_offset_commit=atomic, retry_attempts_max=-1, runs_on=runs_on,
        converter={"type": "json", "schemas_enable": False},
    )  # fmt: skip
    spark = {"master": "local[2]", "start": "when_needed"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"spark": spark}))
    pg.execute("create table orders (id int primary key, what text)")
    pg.execute("insert into orders select n, 'first' from generate_series(1, 100) n")
    limit_s = BATCH_S + (JOB_S if runs_on == "spark" else 0.0)
    life = _live(file, tmp_path / "first")
    again = None
    try:
        wait_until(lambda: _sink(file, life).get("rows") == 100, TIMEOUT_S, "the first rows")
        begun = _ranges_begun(tmp_path / "first")
        (cluster.kill if outage == "killed" else cluster.pause)(1)
        pg.execute("insert into orders select n, 'second' from generate_series(101, 110) n")
        wait_until(lambda: _ranges_begun(tmp_path / "first") > begun, TIMEOUT_S, "the second rows' range")
        _end_in_time(life, limit_s)
        # And one that has never reached a broker.
        again = _live(file, tmp_path / "again")
        wait_until(lambda: "state='streaming'" in again.last_words(), TIMEOUT_S, "the stream")
        wait_until(lambda: _asks(again, cluster), TIMEOUT_S, "a request to the broker")
        _end_in_time(again, limit_s + (SPARK_S if runs_on == "spark" else 0.0))
    finally:
        (cluster.start_node if outage == "killed" else cluster.resume)(1)
        for each in (life, again):
            if each is not None:
                each.close()
    done = _command("run", file, "--until-caught-up")
    assert done.returncode == 0, done.stderr
    topic = read_topic(cluster.bootstrap, f"{pg.name}.public.orders")
    changes = _changes([(message.key_document, message.document) for message in topic])
    expected = Counter(("r", n, "first") for n in range(1, 101))
    expected.update(("c", n, "second") for n in range(101, 111))
    assert (changes if atomic else Counter(set(changes))) == expected
