"""The command on a real PostgreSQL with a real Spark: a user's first hour."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable

from tailrace_servers.ports import free_port
from tests.support.wait import wait_until

#: Spark may have to start on a busy machine.
TIMEOUT_S = 240
CANARY = "c4n4ry-S3cret"


def tailrace(*arguments, check=0):
    done = subprocess.run(
        [sys.executable, "-m", "tailrace", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env={**os.environ, "CANARY": CANARY},
    )
    assert done.returncode == check, done.stdout + done.stderr
    assert CANARY not in done.stdout + done.stderr
    return done.stdout


def status(file):
    return json.loads(tailrace("status", file, "--json"))


def changes_in(directory: Path) -> Counter[tuple[str, int]]:
    """Count (operation, id) over all JSON Lines files."""
    found: Counter[tuple[str, int]] = Counter()
    for path in sorted(directory.glob("public.orders/*.jsonl")):
        for line in path.read_text().splitlines():
            change = json.loads(line)
            found[change["op"], (change["after"] or change["before"])["id"]] += 1
    return found


def operations_in(directory: Path) -> Counter[str]:
    return Counter(ds.dataset(directory / "public.orders").to_table().column("_op").to_pylist())


def mirrored(directory: Path) -> dict[int, str]:
    rows = DeltaTable(str(directory / "public.orders")).to_pyarrow_table().to_pylist()
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row["what"] for row in rows}


def pipeline_file(directory, pg, ui_port=None):
    file = directory / "pipeline.yaml"
    # Spark starts only where its page is looked at: so few rows need none.
    rest = "start: when_needed"
    if ui_port is not None:
        rest = f"conf: {{spark.ui.enabled: 'true', spark.ui.port: '{ui_port}'}}"
    file.write_text(
        f"name: {pg.name}\n"
        f"source: {{host: 127.0.0.1, port: {pg.port}, user: postgres, dbname: {pg.name}, "
        "password: '${env:CANARY}'}\n"
        "log: {path: ./log}\n"
        "sinks:\n"
        "  - {type: jsonl, path: ./lines}\n"
        "  - {type: parquet, path: ./files}\n"
        "  - {type: delta, mode: mirror, path: ./mirror}\n"
        f"spark: {{master: 'local[2]', {rest}}}\n"
    )
    return file


def page_of_spark(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        shown = answer.read().decode()
    finally:
        connection.close()
    return shown if answer.status == 200 else ""


def application_of_spark(port):
    """Return the application's id; None until Spark has started, even if its page is up."""
    try:
        return json.loads(page_of_spark(port, "/api/v1/applications"))[0]["id"]
    except (OSError, ValueError, IndexError):
        return None


def shown_by_spark(port):
    """Return everything that Spark's user interface shows of the configuration, once Spark has started."""
    application = wait_until(lambda: application_of_spark(port), TIMEOUT_S, "Spark, beside the first rows")
    api = page_of_spark(port, f"/api/v1/applications/{application}/environment")
    return api + page_of_spark(port, "/environment/")


@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.each_postgres("one pipeline as a whole")
def test_a_pipeline_from_the_first_row_to_a_rebuilt_sink(pg, tmp_path):
    pg.execute("create table orders (id int primary key, what text)")
    pg.execute("insert into orders select g, 'thing' from generate_series(1, 50) g")
    file = pipeline_file(tmp_path, pg)

    # The first run: existing rows.
    tailrace("run", file, "--until-caught-up")
    first = Counter({("r", number): 1 for number in range(1, 51)})
    assert changes_in(tmp_path / "lines") == first
    assert operations_in(tmp_path / "files") == {"r": 50}
    at_rest = status(file)
    assert at_rest["state"] == "stopped"
    assert [sink["lag_bytes"] for sink in at_rest["sinks"]] == [0, 0, 0]

    # A run that is watched, met by a second engine, and stopped by a signal.
    pg.execute("update orders set what = 'new' where id <= 5")
    pg.execute("delete from orders where id > 48")
    pg.execute("insert into orders values (100, 'late')")
    port = free_port()
    pipeline_file(tmp_path, pg, port)
    with (tmp_path / "output").open("wb") as output:
        engine = subprocess.Popen(
            [sys.executable, "-m", "tailrace", "run", str(file), "--verbose"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "CANARY": CANARY},
        )
    try:
        expected = first + Counter({("u", number): 1 for number in range(1, 6)})
        expected += Counter([("d", 49), ("d", 50), ("c", 100)])
        wait_until(lambda: changes_in(tmp_path / "lines") == expected, TIMEOUT_S, "the changes")
        now = dict(pg.query("select id, what from orders"))
        wait_until(lambda: mirrored(tmp_path / "mirror") == now, TIMEOUT_S, "the mirror")
        wait_until(lambda: status(file)["sinks"][2]["lag_bytes"] == 0, TIMEOUT_S, "its status")
        # Small ranges need no Spark: their rows may come before it has started.
        wait_until(lambda: status(file)["state"] != "starting", TIMEOUT_S, "Spark")
        watched = status(file)
        assert (watched["state"], watched["error"], watched["pid"]) == ("streaming", None, engine.pid)
        # The password is nowhere in what Spark shows.
        environment = shown_by_spark(port)
        assert "spark.ui.port" in environment
        assert CANARY not in environment
        tailrace("run", file, check=1)
        assert status(file)["pid"] == engine.pid
        engine.send_signal(signal.SIGTERM)
        assert engine.wait(60) == 0
    finally:
        engine.kill()
        engine.wait()
    pipeline_file(tmp_path, pg)
    assert status(file)["state"] == "stopped"
    assert mirrored(tmp_path / "mirror") == now

    # Again without changes: nothing is repeated. A sink that is emptied is rebuilt.
    tailrace("replay", file, "--sink", "0")
    assert changes_in(tmp_path / "lines") == expected
    shutil.rmtree(tmp_path / "lines")
    tailrace("replay", file, "--sink", "jsonl-lines")
    assert changes_in(tmp_path / "lines") == expected
    tailrace("run", file, "--until-caught-up")
    assert changes_in(tmp_path / "lines") == expected
    assert operations_in(tmp_path / "files") == {"r": 50, "u": 5, "d": 2, "c": 1}
    assert mirrored(tmp_path / "mirror") == now

    # The secret that the runs resolved is in none of their files, nor in the engine's output.
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or CANARY.encode() not in path.read_bytes()
