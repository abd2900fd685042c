"""Runs the commands of docs/subscriptions.md exactly as they are written."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.postgres import Database
from tests.support.subscriptions import ServedPipeline
from tests.support.wait import wait_until

PAGE = Path(__file__).resolve().parents[2] / "docs" / "subscriptions.md"
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SERVE, HEAD, FILTERED, GOING_ON = BLOCK.findall(PAGE.read_text("utf-8"))


@contextmanager
def shell(script: str, folder: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command, found = ["bash", "-c", script], environment | {"PATH": path}
    with subprocess.Popen(
        command, cwd=folder, env=found, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def events(process: subprocess.Popen[str], count: int) -> tuple[list[int], str]:
    """Return the rows of the next `count` events, and the last `id`."""
    assert process.stdout is not None
    rows: list[int] = []
    last_id = ""
    while len(rows) < count:
        line = process.stdout.readline()
        assert line, "curl has ended"
        if line.startswith("id: "):
            last_id = line[4:].strip()
        if line.startswith("data: "):
            rows.append(json.loads(line[6:])["after"]["id"])
    return rows, last_id


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_commands_of_the_page_have_the_documented_results(pg: Database, tmp_path: Path) -> None:
    pg.execute("create table orders(id int primary key, qty int)")
    pg.execute("insert into orders values (1, 5), (2, 1)")
    shop = ServedPipeline(tmp_path, pg.dsn)
    shop.write(in_run=False)
    running = shop.start("run")
    token = tmp_path / "token"
    clean = {name: value for name, value in os.environ.items() if name != "TAILRACE_TOKEN"}
    try:
        wait_until((tmp_path / "shop.log" / "identity.json").exists, 120, "the log")
        serve = f'{SERVE.rstrip()} &\necho "$TAILRACE_TOKEN" > {token}\nwait\n'
        with shell(serve, tmp_path, clean):
            wait_until(lambda: token.exists() and token.read_text().strip(), 30, "the token")
            environment = clean | {"TAILRACE_TOKEN": token.read_text().strip()}
            once = HEAD.strip().replace("-N", "-s -o /dev/null --max-time 1")
            retry = f"until {once} || [ $? = 28 ]; do sleep 0.1; done"  # 28: the time limit
            subprocess.run(["bash", "-c", retry], env=environment, check=True, timeout=120)
            with shell(FILTERED, tmp_path, environment) as curl:
                rows, last_id = events(curl, 1)
                assert rows == [1]
            with shell(HEAD, tmp_path, environment) as curl:
                assert curl.stdout is not None
                assert curl.stdout.readline() == "retry: 1000\n"
                pg.execute("insert into orders values (3, 7), (4, 2)")
                assert events(curl, 2)[0] == [3, 4]
            with shell(GOING_ON, tmp_path, environment | {"LAST_ID": last_id}) as curl:
                assert events(curl, 3)[0] == [2, 3, 4]
            with shell(FILTERED, tmp_path, environment) as curl:
                assert events(curl, 2)[0] == [1, 3]
    finally:
        running.kill()
        running.wait(60)
