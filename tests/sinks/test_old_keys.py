"""A history has the old key of each update that changes a key, so a table can be rebuilt from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from tailrace.sinks.files.parquet import ParquetWriter
from tests.support.sinks.rig import opened, rekey, relation, update_whole, write
from tests.support.spark.wire import INT8, TEXT, HandmadeLog, delete, insert

ORDERS = relation(1, "public.orders", {"id": INT8, "line": TEXT, "note": TEXT}, ("id", "line"))
WHOLE = relation(1, "public.orders", {"id": INT8, "line": TEXT, "note": TEXT}, ("id", "line"), "f")


@pytest.fixture
def log(tmp_path: Path) -> Any:
    with HandmadeLog(tmp_path / "log") as written:
        yield written


def history(kind: str, folder: Path) -> list[dict[str, Any]]:
    """Return the changes in log order, each with `op`, `key`, `old_key` and `note`."""
    if kind == "jsonl":
        lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
        found = sorted(map(json.loads, lines), key=lambda line: line["position"]["log_offset"])
        return [
            {
                "op": line["op"],
                "key": key_of(line["after"] or line["before"]),
                "old_key": key_of(line["before"]) if line["op"] == "u" and line["before"] else None,
                "note": (line["after"] or {}).get("note"),
            }
            for line in found
        ]
    tables = (
        [DeltaTable(str(folder)).to_pyarrow_table()]
        if kind == "append"
        else [pq.read_table(path) for path in folder.glob("*.parquet")]
    )
    rows = sorted((row for table in tables for row in table.to_pylist()), key=lambda row: row["_log_offset"])
    return [
        {
            "op": row["_op"],
            "key": key_of(row),
            "old_key": key_of(dict(row["_old_key"])) if row.get("_old_key") else None,
            "note": row["note"],
        }
        for row in rows
    ]


def key_of(row: dict[str, Any]) -> tuple[int, str]:
    return int(row["id"]), row["line"]


def rebuilt(changes: list[dict[str, Any]]) -> dict[tuple[int, str], str]:
    table: dict[tuple[int, str], str] = {}
    for change in changes:
        table.pop(change["old_key"] or change["key"], None)
        if change["op"] != "d":
            table[change["key"]] = change["note"]
    return table


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "append"])
def test_a_table_with_changed_keys_can_be_rebuilt_from_its_history(
    kind: str, tmp_path: Path, log: HandmadeLog
) -> None:
    first = log.commit(
        ORDERS, insert(1, 1, "a", "one"), insert(1, 2, "b", "two"), rekey(1, (1, "a", None), (5, "a", "one"))
    )
    end = log.commit(
        WHOLE,
        update_whole(1, (5, "a", "one"), (5, "c", "three")),
        update_whole(1, (2, "b", "two"), (2, "b", "four")),
        insert(1, 9, "z", "nine"),
        delete(1, 9, "z", None),
    )
    sink = opened(kind, tmp_path / "lake", log)
    write(sink, log, 0, first)
    write(sink, log, first, end)
    changes = history(kind, tmp_path / "lake" / "public.orders")
    assert rebuilt(changes) == {(5, "c"): "three", (2, "b"): "four"}
    assert len(changes) == 7  # one row for each change


@pytest.mark.parametrize("kind", ["parquet", "append"])
def test_a_history_that_an_older_version_began_is_continued(
    kind: str, tmp_path: Path, log: HandmadeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = log.commit(ORDERS, insert(1, 1, "a", "one"))
    end = log.commit(rekey(1, (1, "a", None), (5, "a", "one")))
    sink = opened(kind, tmp_path / "lake", log)
    with monkeypatch.context() as before:
        before.setattr(
            ParquetWriter, "write", lambda writer, changes: writer.write_batch(changes.rows())
        )  # as older versions did
        write(sink, log, 0, first)
    write(sink, log, first, end)
    changes = history(kind, tmp_path / "lake" / "public.orders")
    assert [change["old_key"] for change in changes] == [None, (1, "a")]
