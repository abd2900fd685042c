"""`tailrace run` over PostgreSQL with real time on: what its user sees and which commands apply."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tailrace_servers.ports import free_port
from tests.support.postgres import Database
from tests.support.wait import wait_until

PAGE = Path(__file__).resolve().parents[2] / "docs" / "realtime.md"
TIMEOUT_S = 120.0
#: Rows that make one transaction larger than the buffer.
MANY = 5_000


class Shop:
    """A pipeline with two sinks, one of which gets no table, and its process."""

    def __init__(self, folder: Path, dsn: str) -> None:
        self._folder, self._file = folder, folder / "shop.yaml"
        self._metrics_port = free_port()
        self._running: subprocess.Popen[bytes] | None = None
        nothing = [{"type": "filter", "where": "after.id < 0"}]
        sinks = [
            {"type": "jsonl", "path": "./lines", "name": "lines", "interval_ms": 0},
            {"type": "jsonl", "path": "./none", "name": "none", "interval_ms": 0, "transformations": nothing},
        ]
        document = {
            "name": "shop",
            "source": {"dsn": dsn, "tables": ["public.orders"]},
            "log": {"path": "./log"},
            "realtime": {"enabled": True, "buffer_bytes": "64KiB"},
            "sinks": sinks,
            "spark": {"start": "when_needed"},
            "engine": {"metrics_port": self._metrics_port},
        }
        self._file.write_text(json.dumps(document))

    def start(self) -> None:
        with self.said.open("ab") as said:
            command = [sys.executable, "-m", "tailrace", "run", str(self._file)]
            self._running = subprocess.Popen(command, stdout=said, stderr=said, env=dict(os.environ))

    def end(self, how: int) -> None:
        """End the process by a signal, if it runs."""
        if self._running is not None:
            self._running.send_signal(how)
            self._running.wait(TIMEOUT_S)
            self._running = None

    @property
    def said(self) -> Path:
        """What the process has printed."""
        return self._folder / "run.out"

    def tailrace(self, *words: str) -> str:
        command = [sys.executable, "-m", "tailrace", *words[:1], *words[1:2], str(self._file), *words[2:]]
        if words[0] != "realtime":
            command = [sys.executable, "-m", "tailrace", words[0], str(self._file), *words[1:]]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout

    def realtime(self, consumer: str = "lines") -> dict[str, Any]:
        found = json.loads(self.tailrace("realtime", "status", "--consumer", consumer, "--json"))
        view: dict[str, Any] = found["consumers"][0]
        return view

    def wait_for(self, consumer: str = "lines", **wanted: Any) -> None:
        wait_until(lambda: wanted.items() <= self.realtime(consumer).items(), TIMEOUT_S, f"{wanted}")

    def metrics(self) -> str:
        url = f"http://127.0.0.1:{self._metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    def rows(self) -> list[tuple[str, int]]:
        """Return the rows in the sink: operation and key, in order."""
        files = sorted((self._folder / "lines").glob("public.orders/*.jsonl"))
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        return [(line["op"], line["after"]["id"]) for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_status_metrics_and_commands_while_rows_come_from_memory_and_from_the_log(
    pg: Database, tmp_path: Path
) -> None:
    pg.execute("create table orders(id bigint primary key, what text)")
    pg.execute("insert into orders select n, 'before' from generate_series(1, 10) n")
    shop, expected = Shop(tmp_path, pg.dsn), [("r", number) for number in range(1, 11)]

    def commit(count: int = 1) -> None:
        """Commit rows in one transaction, and wait for them."""
        first = 1 + max(number for _, number in expected)
        pg.execute(
            "insert into orders select n, 'x' from generate_series(%s::bigint, %s) n",
            [first, first + count - 1],
        )
        expected.extend(("c", number) for number in range(first, first + count))
        wait_until(lambda: len(shop.rows()) >= len(expected), TIMEOUT_S, "the rows")
        assert shop.rows() == expected

    try:
        shop.start()
        wait_until((tmp_path / "log" / "identity.json").exists, TIMEOUT_S, "the log")
        for consumer in ("lines", "none"):
            shop.wait_for(consumer, mode="on")
        for _ in range(5):
            commit()
        # The sink `none` gets nothing of it, and goes on.
        wait_until(
            lambda: shop.realtime("none")["position"] >= shop.realtime("lines")["position"], TIMEOUT_S, "it"
        )
        named = re.findall(r"`(tailrace_realtime_\w+)`", PAGE.read_text("utf-8"))
        for name in named:
            assert re.search(rf'^{name}{{.*consumer="lines".*}} \d', shop.metrics(), re.MULTILINE), name
        assert "real time on" in shop.tailrace("status")
        wait_until(lambda: "lines running, real time on" in shop.said.read_text(), TIMEOUT_S, "the display")

        commit(MANY)  # too large for the buffer: falls back to the log
        shop.wait_for(mode="off", because="buffer full", fall_backs=1, log_mode="active")
        fallen = r'tailrace_realtime_fall_backs_total{.*consumer="lines".*} 1.0'
        wait_until(lambda: re.search(fallen, shop.metrics()), TIMEOUT_S, "the metric")
        assert "the log takes over" in shop.said.read_text()
        for command in ("on", "off", "on"):
            shop.tailrace("realtime", command)
        shop.wait_for(mode="on", wanted=True)
        commit()

        last = expected[-1][1]
        shop.tailrace("snapshot", "--table", "public.orders")
        pg.execute("insert into orders values (%s, 'beside it')", [last + 1])
        again = Counter(expected) + Counter([("r", number) for number in range(1, last + 1)])
        again["c", last + 1] += 1

        def is_whole() -> bool:
            found = Counter(shop.rows())
            found.pop(("r", last + 1), None)  # that row may have been captured, too
            return found >= again

        wait_until(is_whole, TIMEOUT_S, "the snapshot beside the stream")
        assert len(shop.rows()) - again.total() in (0, 1)
    finally:
        shop.end(signal.SIGKILL)


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_a_command_while_nothing_runs_applies_at_the_next_start(pg: Database, tmp_path: Path) -> None:
    pg.execute("create table orders(id bigint primary key, what text)")
    shop = Shop(tmp_path, pg.dsn)
    try:
        shop.start()
        wait_until((tmp_path / "log" / "identity.json").exists, TIMEOUT_S, "the log")
        shop.wait_for(mode="on")
        pg.execute("insert into orders select n, 'x' from generate_series(1::bigint, %s) n", [MANY])
        shop.wait_for(mode="off", because="buffer full")
        for how, command, mode in (
            (signal.SIGKILL, "on", "on"),
            (signal.SIGTERM, "off", "off"),
            (signal.SIGKILL, "on", "on"),
        ):
            shop.end(how)
            assert shop.realtime()["because"].startswith("no engine runs")
            shop.tailrace("realtime", command)
            pg.execute("insert into orders select max(id) + 1, 'y' from orders")
            shop.start()
            shop.wait_for(mode=mode, log_mode="passive" if mode == "on" else "active")
        wait_until(lambda: len(shop.rows()) >= MANY + 3, TIMEOUT_S, "the rows")
        assert shop.rows() == [("c", number) for number in range(1, MANY + 4)]
    finally:
        shop.end(signal.SIGKILL)
