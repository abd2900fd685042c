"""Runs `tailrace` as a process on a keyspace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tailrace_servers.vitess import EmbeddedVitess
from tests.support.vitess.fake_vtgate import FakeVtgate

TIMEOUT_S = 240


_SINKS = {
    "jsonl": "  - {type: jsonl, path: ./lines}\n",
    "mirror": "  - {type: delta, path: ./mirror, mode: mirror}\n",
}


def pipeline_file(
    at: Path,
    cluster: EmbeddedVitess | FakeVtgate,
    table: str,
    *,
    sinks: Sequence[str] = ("jsonl", "mirror"),
    kafka: str = "",
    **settings: object,
) -> Path:
    """Write a pipeline of one table into JSON Lines and a mirror, in `at`.

    :param kafka: brokers that get it as well, exactly once.
    """
    section = {
        "type": "vitess",
        "hosts": [cluster.address],
        "keyspace": cluster.keyspace,
        "tables": [f"{cluster.keyspace}.{table}"],
        "heartbeat_interval_s": 1,
        **settings,
    }
    file = at / "pipeline.yaml"
    text = f"name: shop\nsource: {json.dumps(section)}\nlog: {{path: ./log}}\nsinks:\n"
    text += "".join(_SINKS[sink] for sink in sinks)
    if kafka:
        sink = {
            "type": "kafka",
            "bootstrap_servers": kafka,
            "atomic_source_offset_commit": True,
            "topic_prefix": at.name,
            "group": at.name,
            "offsets_topic": f"{at.name}-offsets",
            "converter": {"type": "json", "schemas_enable": False},
            "topics": [{"tables": ["*.*"], "partitions": 3, "replication_factor": 1}],
        }
        text += f"  - {json.dumps(sink)}\n"
    file.write_text(text)
    return file


def tailrace(*arguments: object, failpoints: str = "", status: int | None = 0, before: str = "pass") -> str:
    """Run a command to its end; return its output.

    :param status: the expected exit status; None: any.
    :param before: Python code that the process runs first.
    """
    program = f"{before}\nimport runpy\nrunpy.run_module('tailrace', run_name='__main__', alter_sys=True)"
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.script", program, "--debug", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env={**os.environ, "TAILRACE_FAILPOINTS": failpoints},
    )
    assert status is None or done.returncode == status, done.stdout + done.stderr
    return done.stdout if "--json" in arguments else done.stdout + done.stderr


def lines_of(at: Path, table: str) -> list[dict[str, Any]]:
    """Return the lines of a table's JSON Lines files."""
    return [
        json.loads(line)
        for path in sorted((at / "lines" / f"shop.{table}").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
