"""`tailrace run` into a user's function: every change at least once, in order, also after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.postgres import Database

TIMEOUT_S = 240
HANDLER = """
import json, os, pathlib, signal

def take(records):
    with (pathlib.Path(__file__).parent / "got.jsonl").open("a") as got:
        for record in records:
            row = [record.source["log_offset"], record.op, (record.after or record.before)["id"]]
            got.write(json.dumps(row) + "\\n")
            if row[2] == int(os.environ.get("DIE_AT", 0)):
                got.flush()
                os.kill(os.getpid(), signal.SIGKILL)
"""


def run(file: Path, die_at: int = 0) -> int:
    """Run until caught up; return the exit status."""
    done = subprocess.run(
        [sys.executable, "-m", "tailrace", "run", str(file), "--until-caught-up"],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env={**os.environ, "DIE_AT": str(die_at)},
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stdout + done.stderr
    return done.returncode


def got(directory: Path) -> list[list[Any]]:
    return [json.loads(line) for line in (directory / "got.jsonl").read_text().splitlines()]


def test_a_function_gets_every_change_in_order_and_unrecorded_ones_again_after_a_kill(
    pg: Database, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(HANDLER)
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        f"name: {pg.name}\n"
        f"source: {{type: postgresql, dsn: '{pg.dsn}', tables: ['public.*']}}\n"
        "log: {path: ./log}\n"
        "sinks: [{type: python, handler: 'mine:take', batch_rows_max: 50}]\n"
    )
    pg.execute("create table orders (id int primary key, note text)")
    pg.execute("insert into orders select n, 'x' from generate_series(1, 100) n")
    assert run(file) == 0
    for n in range(101, 301):
        pg.execute(f"insert into orders values ({n}, 'y')")
    pg.execute("delete from orders where id <= 10")
    before = len(got(tmp_path))
    assert before == 100
    assert run(file, die_at=270) == -signal.SIGKILL
    killed = got(tmp_path)[before:]
    assert run(file) == 0
    rows = got(tmp_path)[before:]
    wanted = [["c", n] for n in range(101, 301)] + [["d", n] for n in range(1, 11)]
    first_seen = {row[0]: row[1:] for row in reversed(rows)}
    assert [first_seen[at] for at in sorted(first_seen)] == wanted
    # The batch whose position was not recorded comes again, from its start, in order.
    again = rows[len(killed) :]
    assert again == sorted(again)
    assert again[0] in killed
