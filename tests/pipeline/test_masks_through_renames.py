"""Masks and exclusions follow a column through renames, for every reader and also for old rows.

The tables have REPLICA IDENTITY FULL, so that the log contains the excluded columns: the readers must
drop them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from tailrace import Engine
from tailrace_servers.kafka import EmbeddedKafka
from tailrace_servers.ports import free_port
from tests.support.kafka.reading import read_topic
from tests.support.postgres import Database
from tests.support.subscriptions import TOKEN, subscribed
from tests.support.wait import wait_until

TIMEOUT_S = 240
#: Values of the masked column and of the excluded one.
CANARY = "c4n4ry"
HANDLER = """
import pathlib

def take(records):
    with (pathlib.Path(__file__).parent / "got.txt").open("a") as got:
        for record in records:
            got.write(f"{record.before} {record.after} {record.key}\\n")
"""


def tailrace(directory: Path, *arguments: Any) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tailrace", *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=TIMEOUT_S, cwd=directory,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert CANARY not in said
    return said


def settings(directory: Path, pg: Database) -> dict[str, Any]:
    return {
        "name": "shop",
        "source": {
            "type": "postgresql",
            "dsn": pg.dsn,
            "tables": ["public.*"],
            "slot": f"s_{pg.name}",
            "columns_exclude": ["public.people.hidden"],
            "masks": [{"columns": ["public.people.secret"], "method": "fixed", "value": "masked"}],
        },
        "log": {"path": str(directory / "log")},
        "spark": {"master": "local[1]", "start": "when_needed"},
    }


def pipeline_file(directory: Path, pg: Database, *sinks: dict[str, Any]) -> Path:
    file = directory / "shop.yaml"
    file.write_text(json.dumps(settings(directory, pg) | {"sinks": sinks}))
    return file


def folder(kind: str, path: str) -> dict[str, Any]:
    mode = {"type": "delta", "mode": kind} if kind in ("append", "mirror") else {"type": kind}
    return {**mode, "path": f"./{path}", "name": path}


EARLY = [folder("jsonl", "lines"), folder("mirror", "mirror"), folder("append", "history")]
LATE = [
    folder("jsonl", "late-lines"),
    folder("mirror", "late-mirror"),
    folder("append", "late-history"),
    folder("parquet", "late-files"),
    {"type": "python", "handler": "mine:take", "name": "function"},
]


def people(pg: Database) -> None:
    pg.execute("create table people (id int primary key, secret text, hidden text, note text)")
    pg.execute("alter table people replica identity full")
    pg.execute(
        f"insert into people values (1, '{CANARY}-a', '{CANARY}-b', 'x'), (2, '{CANARY}-c', null, 'y')"
    )


def rename(pg: Database) -> None:
    pg.execute("alter table people rename secret to told")
    pg.execute("alter table people rename hidden to shown")
    pg.execute(f"insert into people values (3, '{CANARY}-d', '{CANARY}-e', 'z')")
    pg.execute(f"update people set told = '{CANARY}-f', note = 'w' where id = 1")
    pg.execute("delete from people where id = 2")


def leaks(directory: Path) -> list[str]:
    """Return the canaries in files below a directory, without the log; Parquet files are decoded."""
    found = []
    for path in directory.rglob("*"):
        if not path.is_file() or path.is_relative_to(directory / "log"):
            continue
        held = path.read_bytes()
        if path.suffix == ".parquet":
            held += str(pq.read_table(path).to_pylist()).encode()
        if CANARY.encode() in held:
            found.append(str(path.relative_to(directory)))
    return found


def followed(pg: Database, directory: Path) -> Path:
    """Capture the table, rename its columns while the pipeline is stopped, and go on; return the pipeline's
    file.
    """
    (directory / "mine.py").write_text(HANDLER)
    people(pg)
    file = pipeline_file(directory, pg, *EARLY)
    tailrace(directory, "run", file, "--until-caught-up")
    rename(pg)
    tailrace(directory, "run", file, "--until-caught-up")
    return file


def test_no_older_or_newer_sink_shows_a_column_under_any_of_its_names(pg: Database, tmp_path: Path) -> None:
    followed(pg, tmp_path)
    file = pipeline_file(tmp_path, pg, *EARLY, *LATE)
    tailrace(tmp_path, "run", file, "--until-caught-up")
    tailrace(tmp_path, "replay", file, "--sink", "late-lines", "--from", 0)
    assert any(CANARY.encode() in path.read_bytes() for path in (tmp_path / "log").rglob("*.seg"))
    assert leaks(tmp_path) == []
    for mirror in ("mirror", "late-mirror"):
        rows = DeltaTable(str(tmp_path / mirror / "public.people")).to_pyarrow_table().to_pylist()
        assert sorted((row["id"], row["told"], row["note"]) for row in rows) == [
            (1, "masked", "w"),
            (3, "masked", "z"),
        ]
        assert not {"shown", "hidden"} & rows[0].keys()
    assert (tmp_path / "got.txt").read_text().count("masked") >= 5


def test_no_command_that_shows_the_log_shows_a_column_under_any_of_its_names(
    pg: Database, tmp_path: Path
) -> None:
    file = followed(pg, tmp_path)
    for words in (
        ("log", "show", file, "--json"),
        ("log", "show", file),
        ("log", "schemas", file),
        ("tail", file, "--from", 0, "--limit", 5, "--json"),
        ("tail", file, "--from", 0, "--limit", 5),
    ):
        said = tailrace(tmp_path, *words)
        assert "people" in said
        if "schemas" not in words:
            assert "masked" in said
            assert "hidden" not in said and "shown" not in said  # noqa: PT018 - one sentence
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "tailrace", "serve", str(file), "--port", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "TAILRACE_TOKEN": TOKEN},
    )  # fmt: skip
    try:
        wait_until(lambda: _is_served(port), 60, "the subscriptions' server")
        with subscribed(port, from_=0) as stream:
            events = [event.data for event in islice(stream, 5)]
        assert CANARY not in "".join(events)
        assert "masked" in events[0]
    finally:
        process.terminate()
        process.wait(60)


def _is_served(port: int) -> bool:
    try:
        with subscribed(port, from_=0):
            return True
    except Exception:  # noqa: BLE001 - not yet
        return False


@pytest.mark.parametrize("way", ["on_record", "on_batch", "converted"])
def test_no_handler_gets_a_column_under_any_of_its_names(pg: Database, tmp_path: Path, way: str) -> None:
    followed(pg, tmp_path)
    got: list[str] = []

    def record(one: Any) -> None:
        got.append(f"{one.before} {one.after} {one.key}")

    def batch(records: Any) -> None:
        got.extend(f"{one.before} {one.after} {one.key}" for one in records)

    def events(records: Any) -> None:
        got.extend(f"{one.key} {one.value}" for one in records)

    handler: dict[str, dict[str, Any]] = {"on_record": {"on_record": record}, "on_batch": {"on_batch": batch}}
    options: dict[str, Any] = {"offset_storage": {"type": "memory"}}
    if way == "converted":
        options["converter"] = {"type": "json"}
    Engine(
        settings(tmp_path, pg),
        settings={"until_caught_up": True},
        options=options,
        **handler.get(way, {"on_batch": events}),
    ).run()
    assert (
        len([text for text in got if not text.endswith("None")]) >= 4
    )  # a delete has no row, a tombstone nothing
    assert "masked" in got[0]
    assert not any(word in text for text in got for word in (CANARY, "hidden", "shown"))


def test_no_topic_of_kafka_gets_a_column_under_any_of_its_names(
    pg: Database, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    followed(pg, tmp_path)
    sink = {
        "type": "kafka",
        "name": "kafka",
        "bootstrap_servers": kafka.bootstrap,
        "topic_prefix": pg.name,
        "group": pg.name,
        "offsets_topic": f"{pg.name}-offsets",
    }
    file = pipeline_file(tmp_path, pg, *EARLY, sink)
    tailrace(tmp_path, "run", file, "--until-caught-up")
    found = read_topic(kafka.bootstrap, f"{pg.name}.public.people")
    texts = [f"{message.key_document} {message.document}" for message in found]
    assert len(texts) >= 5
    assert "masked" in texts[0]
    # The records' schemas do not name an excluded column, either.
    assert not any(word in text for text in texts for word in (CANARY, "hidden", "shown"))
