"""Values at the limits of their types, written by each sink and read back by several readers."""

from __future__ import annotations

import json
from typing import Any

import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable

from tailrace.decode.postgres_types import FIRST_NOT_BUILT_IN
from tailrace.model import ValueModes
from tailrace.sinks.delta.append import DeltaAppend
from tailrace.sinks.delta.mirror import small_merge
from tailrace.sinks.delta.mirror.sink import DeltaMirror
from tailrace.sinks.delta.sink import DeltaSink
from tailrace.sinks.write_job import SinkInput
from tests.support.converters.types import HSTORE, HSTORE_TYPE
from tests.support.decode.wire import decode, vector
from tests.support.sinks.rig import opened, relation, write
from tests.support.spark.wire import (
    DATE,
    FLOAT8,
    INT8,
    TEXT,
    TIMESTAMP,
    TIMESTAMPTZ,
    UNCHANGED,
    HandmadeLog,
    delete,
    insert,
    numeric,
    row,
    update,
    xlog,
)

INT4_ARRAY = 1007
COLUMNS = {
    "id": INT8,
    "note": TEXT,
    "day": DATE,
    "at": TIMESTAMP,
    "zoned": TIMESTAMPTZ,
    "amount": numeric(6, 2),
    "real": FLOAT8,
    "many": INT4_ARRAY,
}
ROWS = [
    (1, "infinite", "infinity", "infinity", "infinity", "NaN", "NaN", "{1,NULL}"),
    (2, "minus\u2028", "-infinity", "-infinity", "-infinity", "-1.50", "-Infinity", "{}"),
    (3, "before", "0044-03-15 BC", "0044-03-15 12:00:00 BC", "0044-03-15 12:00:00+00 BC", "0", "-0", "{{1}}"),
    (4, "far", "5874897-12-31", "294276-12-31 23:59:59", "294276-12-31 23:59:59+00", None, None, "[0:0]={7}"),
]  # fmt: skip
NOTES = {1: "infinite", 2: "minus\u2028", 3: "before", 4: "far"}


@pytest.fixture
def log(tmp_path):
    with HandmadeLog(tmp_path / "log") as written:
        yield written


def fill(log: HandmadeLog) -> tuple[int, int]:
    middle = log.commit(relation(1, "public.odd", COLUMNS), *(insert(1, *row) for row in ROWS))
    return middle, log.commit(*(update(1, *row) for row in ROWS))


def notes(rows: list[dict[str, Any]]) -> dict[int, str]:
    return {row["id"]: row["note"] for row in rows}


def test_files_hold_odd_values(tmp_path, log):
    _, end = fill(log)
    for kind in ("parquet", "jsonl"):
        write(opened(kind, tmp_path / kind, log), log, 0, end)
    found = ds.dataset(tmp_path / "parquet" / "public.odd").to_table()
    assert notes(found.select(["id", "note"]).to_pylist()) == NOTES
    special = {row["id"]: dict(row["_special"] or ()) for row in found.select(["id", "_special"]).to_pylist()}
    assert special[1] == {"day": "infinity", "at": "infinity", "zoned": "infinity", "amount": "NaN"}
    assert special[3] == {"many": "{{1}}"}
    paths = sorted((tmp_path / "jsonl" / "public.odd").iterdir())
    texts = [line for path in paths for line in path.read_text("utf-8").split("\n") if line]
    lines = [json.loads(line)["after"] for line in texts]
    assert notes(lines) == NOTES


def test_a_column_with_the_escaped_name_of_another_is_renamed_in_every_file(tmp_path, log):
    first = log.commit(relation(1, "public.odd", {"id": INT8, "_op~own": TEXT}), insert(1, 1, "a"))
    both = relation(1, "public.odd", {"id": INT8, "_op~own": TEXT, "_op": TEXT})
    end = log.commit(both, insert(1, 2, "b", "c"))
    sink = opened("parquet", tmp_path / "lake", log)
    write(sink, log, 0, first)
    write(sink, log, first, end)
    files = [ds.dataset(path).to_table() for path in sorted((tmp_path / "lake" / "public.odd").iterdir())]
    assert files[0].select(["id", "_op~own~own"]).to_pylist() == [{"id": 1, "_op~own~own": "a"}]
    assert files[1].select(["_op~own~own", "_op~own", "_op"]).to_pylist() == [
        {"_op~own~own": "b", "_op~own": "c", "_op": "c"}
    ]


@pytest.mark.parametrize(
    ("kind", "by_spark"),
    [("append", False), ("mirror", False), ("mirror", True)],
    ids=["append", "mirror by delta-rs", "mirror by Spark"],
)
@pytest.mark.ci
def test_delta_tables_hold_odd_values_for_spark_and_other_readers(
    kind, by_spark, spark, tmp_path, log, monkeypatch
):
    if by_spark:
        monkeypatch.setattr(small_merge, "TARGET_BYTES_MAX", -1)
    middle, end = fill(log)
    sink = opened(kind, tmp_path / "lake", log)
    write(sink, log, 0, middle, spark)
    write(sink, log, middle, end, spark)
    folder = str(tmp_path / "lake" / "public.odd")

    table = DeltaTable(folder)
    assert notes(table.to_pyarrow_table(columns=["id", "note"]).to_pylist()) == NOTES
    assert table.to_pyarrow_table(filters=[("id", ">", 2)], columns=["id"]).num_rows == (
        2 if kind == "mirror" else 4
    )
    assert len(table.to_pyarrow_table()) == (4 if kind == "mirror" else 8)

    read = spark.read.format("delta").load(folder)
    assert {row.id: row.note for row in read.select("id", "note").collect()} == NOTES
    early = read.where("day < '1000-01-01'").selectExpr("id", "cast(day as string) day").distinct().collect()
    assert {row.id for row in early} == {2, 3}
    assert read.where("id = 3 and amount = 0").count() == (1 if kind == "mirror" else 2)
    text = read.where("id = 1").selectExpr(
        "to_json(_position.special) s" if kind == "mirror" else "to_json(_special) s"
    )
    assert json.loads(text.first().s)["at"] == "infinity"


RECORDED = vector("types")
#: Columns of every built-in type, with the texts that a real server sent for them.
EVERY = {
    changes.relation.table: (
        (changes.relation.columns[1].type_oid, changes.relation.columns[1].type_modifier),
        [row[1] for row in RECORDED["tables"][changes.relation.table]["rows"]],
    )
    for changes in decode(bytes.fromhex(RECORDED["frames"]))
    if changes.relation and changes.relation.columns[1].type_oid < FIRST_NOT_BUILT_IN
}
COUNT = max(len(texts) for _, texts in EVERY.values())
TEXTS = {
    name: [*texts, *[None] * (COUNT - len(texts))] for name, (_, texts) in EVERY.items()
}  # fmt: skip


def every_type() -> list[bytes]:
    shape = relation(1, "public.every", {"id": INT8, **{name: kind for name, (kind, _) in EVERY.items()}})
    return [shape, *(insert(1, n, *(texts[n] for texts in TEXTS.values())) for n in range(COUNT))]


def cast_texts(name: str) -> list[str | None]:
    return (
        [{"t": "true", "f": "false"}.get(str(text), text) for text in TEXTS[name]]
        if name == "t_bool"
        else TEXTS[name]
    )


@pytest.mark.parametrize(
    ("kind", "by_spark"),
    [("parquet", False), ("jsonl", False), ("append", False), ("mirror", False), ("mirror", True)],
)
@pytest.mark.slow
def test_a_cast_to_text_gives_the_servers_text(kind, by_spark, request, tmp_path, log, monkeypatch):
    spark = None
    if by_spark:
        monkeypatch.setattr(small_merge, "TARGET_BYTES_MAX", -1)
        spark = request.getfixturevalue("spark")
    end = log.commit(*every_type())
    steps = [{"type": "cast", "fields": dict.fromkeys(EVERY, "text")}]
    write(opened(kind, tmp_path / "lake", log, steps=steps), log, 0, end, spark)
    folder = tmp_path / "lake" / "public.every"
    if kind == "jsonl":
        lines = [line for path in folder.iterdir() for line in path.read_text("utf-8").split("\n") if line]
        rows = [json.loads(line)["after"] for line in lines]
    else:
        read = (
            ds.dataset(folder).to_table() if kind == "parquet" else DeltaTable(str(folder)).to_pyarrow_table()
        )
        assert all(read.schema.field(name).type == "string" for name in EVERY)
        rows = read.to_pylist()
    rows.sort(key=lambda row: row["id"])
    for name in EVERY:
        assert [row[name] for row in rows] == cast_texts(name), name
    assert not any(row.get("_special") or (row.get("_position") or {}).get("special") for row in rows)


@pytest.mark.parametrize(
    "mode", [DeltaAppend("follow"), DeltaMirror("refuse", "follow")], ids=["append", "mirror"]
)
def test_a_column_that_becomes_text_has_the_servers_text_for_old_values(mode, tmp_path, log):
    before = log.commit(*every_type())
    typed = relation(1, "public.every", {"id": INT8, **dict.fromkeys(EVERY, TEXT)})
    end = log.commit(typed, insert(1, COUNT, *("new" for _ in EVERY)))
    sink = DeltaSink("lake", tmp_path / "lake", mode, SinkInput(None))
    sink.open(log.directory.identity, "shop")
    write(sink, log, 0, before)
    write(sink, log, before, end)
    rows = DeltaTable(str(tmp_path / "lake" / "public.every")).to_pyarrow_table().to_pylist()
    rows.sort(key=lambda row: row["id"])
    for name in EVERY:
        texts = cast_texts(name)
        if name == "t_box_array":  # an old column does not tell what separates its items
            texts[0] = '{"(2,2),(1,1)","(4,4),(3,3)"}'
        if name == "t_char" and mode.kind == "mirror":  # as ALTER TABLE casts it
            texts = [text and text.rstrip() for text in texts]
        assert [row[name] for row in rows] == [*texts, "new"], name
    assert not any(row.get("_special") or (row.get("_position") or {}).get("special") for row in rows)


@pytest.mark.parametrize("identity", ["d", "f"], ids=["by key", "by whole rows"])
@pytest.mark.slow
def test_a_mirror_tells_rows_apart_by_maps(identity, spark, tmp_path, log):
    shape = relation(
        1, "public.t", {"h": HSTORE, "n": INT8, "big": TEXT}, ("h",) if identity == "d" else (), identity
    )
    before = [('"a"=>"1"', 1, "x"), ('"a"=>NULL', 2, "y"), ("", 3, "z"), ('"c"=>"1"', 4, None)]
    middle = log.commit(HSTORE_TYPE, shape, *(insert(1, *cells) for cells in before))
    if identity == "d":
        moved = update(1, '"b"=>"1"', 1, UNCHANGED, key=('"a"=>"1"', None, None))
        gone = delete(1, "", None, None)
    else:
        whole = b"U" + (1).to_bytes(4, "big") + b"O" + row(before[0]) + b"N"
        moved = xlog(whole + row(('"b"=>"1"', 1, "x")))
        gone = xlog(b"D" + (1).to_bytes(4, "big") + b"O" + row(before[2]))
    end = log.commit(moved, gone)
    taken = SinkInput(modes=ValueModes(hstore="map"))
    sink = DeltaSink("lake", tmp_path / "lake", DeltaMirror("full_row"), taken)
    sink.open(log.directory.identity, "shop")
    write(sink, log, 0, middle, spark)
    write(sink, log, middle, end, spark)
    found = DeltaTable(str(tmp_path / "lake" / "public.t")).to_pyarrow_table().to_pylist()
    rows = sorted((each["n"], dict(each["h"]), each["big"]) for each in found)
    assert rows == [(1, {"b": "1"}, "x"), (2, {"a": None}, "y"), (4, {"c": "1"}, None)]
