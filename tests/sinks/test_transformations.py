"""Transformations of a sink's tables: rows, keys, JSON and schemas are the transformed ones."""

from __future__ import annotations

import functools
import itertools
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable

from tailrace import failpoints
from tailrace.decode.postgres_types import OIDS
from tailrace.errors import Kind, TailraceError
from tests.support.sinks.rig import (
    InProcess,
    delete_whole,
    offsets,
    opened,
    rekey,
    relation,
    snapshot,
    update_whole,
    write,
    write_alone,
)
from tests.support.spark.wire import (
    BOOL,
    DATE,
    FLOAT8,
    INT4,
    INT8,
    TEXT,
    TIMESTAMP,
    TIMESTAMPTZ,
    UNCHANGED,
    HandmadeLog,
    delete,
    insert,
    numeric,
    truncate,
    update,
)

COLUMNS = {"id": INT8, "qty": INT4, "price": numeric(10, 2), "note": TEXT, "made": TIMESTAMP}
ORDERS = relation(1, "public.orders", COLUMNS)
HISTORIES = ["parquet", "jsonl", "append"]
TABLES = ["parquet", "append"]

TOTAL = {"type": "add_fields", "computed": {"total": "after.qty * after.price"}, "static": {"region": "eu"}}
STEPS: list[dict[str, Any]] = [
    {"type": "rename", "fields": {"id": "order_id"}},
    {"type": "mask", "fields": ["note"], "value": "?"},
    TOTAL,
    {"type": "cast", "fields": {"qty": "text", "total": "double precision"}},
    {"type": "timestamps", "fields": ["made"], "to": "date"},
    {"type": "drop_fields", "fields": ["price"]},
]


@pytest.fixture
def log(tmp_path: Path):
    with HandmadeLog(tmp_path / "log") as written:
        yield written


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    failpoints.arm("")


def readable(table: pa.Table) -> list[dict[str, Any]]:
    """Rows with days or microseconds since 1970 for dates and timestamps: Python has no infinite ones."""
    for at, field in enumerate(table.schema):
        if pa.types.is_date(field.type) or pa.types.is_timestamp(field.type):
            to = pa.int32() if pa.types.is_date(field.type) else pa.int64()
            table = table.set_column(at, field.name, table.column(at).cast(to))
    return table.to_pylist()


def mirrored(folder: Path) -> list[dict[str, Any]]:
    """A mirror's rows without the column `_position`, sorted by their first column."""
    table = DeltaTable(str(folder)).to_pyarrow_table().drop_columns(["_position"])
    return readable(table.sort_by(table.column_names[0]))


def rows(kind: str, folder: Path) -> list[dict[str, Any]]:
    """Rows of a history in log order; of JSON Lines the row after the change, with `_op`."""
    if kind == "append":
        return readable(DeltaTable(str(folder)).to_pyarrow_table().sort_by("_log_offset"))
    if kind == "parquet":
        return readable(ds.dataset(str(folder), format="parquet").to_table().sort_by("_log_offset"))
    lines = [json.loads(line) for path in folder.iterdir() for line in path.read_text("utf-8").splitlines()]
    lines.sort(key=lambda line: line["position"]["log_offset"])
    return [{**(line["after"] or {}), "_op": line["op"], "_before": line["before"]} for line in lines]


def own(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith("_")}


def fill(log: HandmadeLog, transactions: int = 4) -> list[int]:
    """Commit `transactions` transactions; return the log's offset before them and after each."""
    one = (1, 3, "2.50", "secret", "2024-01-31 10:00:00.5")
    two = (2, None, "1.00", None, "infinity")
    written = [
        (ORDERS, insert(1, *one), insert(1, *two)),
        (update(1, 1, 4, "2.50", UNCHANGED, "2024-02-01 00:00:00"), delete(1, 2, None, None, None, None)),
        (rekey(1, (1, None, None, None, None), (7, 5, "3.00", "n", "2024-03-01 00:00:00")),),
        (truncate(1), insert(1, 9, 1, "0.10", "", None)),
    ]
    return [log.writer.tail.offset, *(log.commit(*frames) for frames in written[:transactions])]


@pytest.mark.parametrize("kind", TABLES)
def test_a_history_has_the_transformed_rows(kind, tmp_path, log):
    ends = fill(log)
    sink = opened(kind, tmp_path / "lake", log, steps=STEPS)
    write(sink, log, ends[0], ends[-1])
    found = rows(kind, tmp_path / "lake" / "public.orders")
    first, second, updated, deleted, moved, emptied, last = found
    assert list(own(first)) == ["order_id", "qty", "note", "made", "region", "total"]
    assert own(first) == {
        "order_id": 1, "qty": "3", "note": "?", "made": 19753, "total": 7.5, "region": "eu",
    }  # fmt: skip
    assert (second["qty"], second["total"], second["note"], second["region"]) == (None, None, None, "eu")
    assert dict(second["_special"]) == {"made": "infinity"}
    assert (updated["total"], updated["note"], updated["_unchanged"]) == (10.0, None, ["note"])
    assert (deleted["_op"], deleted["order_id"], deleted["region"]) == ("d", 2, "eu")
    assert (moved["order_id"], moved["_old_key"]) == (7, [("order_id", "1")])
    assert emptied["_op"] == "t"
    assert set(own(emptied).values()) == {None}
    assert (last["total"], last["made"], last["note"]) == (0.1, None, "?")


def test_json_lines_have_the_transformed_rows(tmp_path, log):
    ends = fill(log)
    sink = opened("jsonl", tmp_path / "lake", log, steps=STEPS)
    write(sink, log, ends[0], ends[-1])
    found = rows("jsonl", tmp_path / "lake" / "public.orders")
    assert own(found[0]) == {
        "order_id": 1, "qty": "3", "note": "?", "made": 19753, "total": 7.5, "region": "eu",
    }  # fmt: skip
    assert own(found[1])["made"] == "infinity"
    assert [row["_before"] for row in found[3:5]] == [{"order_id": 2}, {"order_id": 1}]


@pytest.mark.parametrize("kind", HISTORIES)
def test_an_expression_may_ask_whether_a_value_was_sent(kind, tmp_path, log):
    ends = fill(log)
    told = {
        "told": "was_sent(after.note)",
        "note2": "case when was_sent(after.note) then after.note else 'as it was' end",
    }
    sink = opened(kind, tmp_path / "lake", log, steps=[{"type": "add_fields", "computed": told}])
    write(sink, log, ends[0], ends[2])
    first, second, updated, _ = rows(kind, tmp_path / "lake" / "public.orders")
    assert [row["told"] for row in (first, second, updated)] == [True, True, False]
    assert [row["note2"] for row in (first, second, updated)] == ["secret", None, "as it was"]
    assert updated.get("_unchanged", ["note"]) == ["note"]


@pytest.mark.parametrize("kind", HISTORIES)
def test_a_history_has_only_the_changes_that_pass_the_filter_in_the_folders_they_are_routed_to(
    kind, tmp_path, log
):
    ends = fill(log)
    steps = [
        {"type": "filter", "where": "after.qty >= 4 or op = 't'"},
        {"type": "route", "topic": "case when after.qty > 4 then 'big.orders' end"},
        {"type": "route", "regex": "public\\.(.*)", "replacement": "small_$1"},
    ]
    sink = opened(kind, tmp_path / "lake", log, steps=steps)
    commit = write(sink, log, ends[0], ends[-1])
    assert [row["qty"] for row in rows(kind, tmp_path / "lake" / "big.orders")] == [5]
    assert [row["_op"] for row in rows(kind, tmp_path / "lake" / "public.small_orders")] == ["u", "t"]
    assert commit.rows == 3
    assert not (tmp_path / "lake" / "public.orders").exists()


@pytest.mark.parametrize("kind", HISTORIES)
def test_predicates_choose_the_changes_that_are_transformed(kind, tmp_path, log):
    ends = fill(log)
    sink = opened(
        kind, tmp_path / "lake", log,
        steps=[{"type": "drop", "predicate": "gone"}, {**TOTAL, "predicate": "gone", "negate": True}],
        predicates={"gone": {"type": "operation", "operations": ["delete", "truncate"]}},
    )  # fmt: skip
    write(sink, log, ends[0], ends[-1])
    found = rows(kind, tmp_path / "lake" / "public.orders")
    assert [row["_op"] for row in found] == ["c", "c", "u", "u", "c"]
    assert {row["region"] for row in found} == {"eu"}


@pytest.mark.parametrize("kind", [*HISTORIES, "mirror"])
def test_executors_and_this_process_write_the_same(kind, tmp_path, log):
    ends = fill(log)[:-1]
    steps = STEPS if kind == "mirror" else [*STEPS, {"type": "filter", "where": "after.qty is not null"}]
    for place, start in (("here", write_alone), ("there", functools.partial(write, spark=InProcess()))):
        sink = opened(kind, tmp_path / place, log, steps=steps)
        start(sink, log, ends[0], ends[-1])
    folders = [tmp_path / place / "public.orders" for place in ("here", "there")]
    here, there = (mirrored(each) if kind == "mirror" else rows(kind, each) for each in folders)
    assert here == there
    assert here


@pytest.mark.parametrize(
    "point", ["sink.in_task", "sink.after_write", "sink.before_commit", "sink.after_commit"]
)
@pytest.mark.parametrize("kind", HISTORIES)
def test_after_a_crash_each_change_that_passes_the_filter_is_written_once(kind, point, tmp_path, log):
    ends = fill(log)
    steps = [*STEPS, {"type": "route", "regex": "public\\.orders", "replacement": "a.b"}]
    steps.append({"type": "filter", "where": "op <> 'd'"})
    sink = opened(kind, tmp_path / "lake", log, steps=steps)
    write(sink, log, ends[0], ends[1])
    failpoints.arm(f"{point}=error")
    with pytest.raises((failpoints.FailpointError, TailraceError)):
        write(sink, log, ends[1], ends[3])
    failpoints.arm("")
    sink.close()
    sink = opened(kind, tmp_path / "lake", log, steps=steps)
    write(sink, log, sink.position("0") or 0, ends[-1])
    found = offsets(kind, tmp_path / "lake" / "a.b")
    assert len(found) == len(set(found)) == 6


# ---------------------------------------------------------------------- mirrors


def test_a_mirror_has_the_transformed_rows(spark, tmp_path, log):
    ends = fill(log)
    sink = opened("mirror", tmp_path / "lake", log, steps=STEPS)
    for start, end in itertools.pairwise(ends[:4]):
        write(sink, log, start, end, spark)
    (found,) = mirrored(tmp_path / "lake" / "public.orders")
    assert found == {
        "order_id": 7, "qty": "5", "note": "?", "made": 19783, "total": 15.0, "region": "eu",
    }  # fmt: skip
    write(sink, log, ends[3], ends[4], spark)
    (found,) = mirrored(tmp_path / "lake" / "public.orders")
    assert (found["order_id"], found["total"]) == (9, 0.1)


def test_a_mirror_of_a_snapshot_applies_later_changes(tmp_path, log):
    first = log.writer.tail.offset
    log.append(snapshot(900, (1, ORDERS, ["1\t2\t1.50\ta\t\\N", "2\t2\t2.00\t\\N\t\\N"])))
    ends = [log.writer.sync().offset, log.commit(ORDERS, update(1, 2, 3, "2.00", "b", None))]
    sink = opened("mirror", tmp_path / "lake", log, steps=STEPS)
    write(sink, log, first, ends[0])
    write(sink, log, ends[0], ends[1])
    found = mirrored(tmp_path / "lake" / "public.orders")
    assert [(row["order_id"], row["total"], row["note"]) for row in found] == [(1, 3.0, "?"), (2, 6.0, "?")]


def test_keys_of_a_mirror_may_be_hashed_and_cast_to_text(spark, tmp_path, log, monkeypatch):
    monkeypatch.setenv("TAILRACE_TEST_SALT", "salt")
    ends = fill(log, 3)
    for steps in (
        [{"type": "cast", "fields": {"id": "text"}}],
        [{"type": "mask", "fields": ["id"], "method": "hash", "salt": "${env:TAILRACE_TEST_SALT}"}],
    ):
        path = tmp_path / steps[0]["type"]
        sink = opened("mirror", path, log, steps=steps)
        for start, end in itertools.pairwise(ends):
            write(sink, log, start, end, spark)
        (found,) = mirrored(path / "public.orders")
        assert isinstance(found["id"], str)
        assert found["qty"] == 5


@pytest.mark.parametrize(
    "step",
    [
        {"type": "drop_fields", "fields": ["id"]},
        {"type": "mask", "fields": ["i*"]},
        {"type": "cast", "fields": {"id": "integer"}},
        {"type": "timestamps", "fields": ["id"], "to": "timestamp"},
        {"type": "add_fields", "computed": {"id": "after.id % 10"}},
    ],
    ids=lambda step: step["type"],
)
def test_a_transformation_that_does_not_keep_a_mirrors_key_is_refused(step, tmp_path, log):
    ends = fill(log)
    sink = opened("mirror", tmp_path / "lake", log, steps=[step])
    with pytest.raises(TailraceError) as raised:
        write(sink, log, ends[0], ends[1])
    assert raised.value.kind is Kind.CONFIG_INVALID
    assert "'id'" in raised.value.message
    assert raised.value.context["table"] == "public.orders"
    assert not (tmp_path / "lake" / "public.orders").exists()
    assert write(opened("append", tmp_path / "history", log, steps=[step]), log, ends[0], ends[1]).rows == 2


def test_a_value_computed_only_from_an_unchanged_column_stays_as_it_was(spark, tmp_path, log):
    ends = fill(log, 2)
    steps = [{"type": "add_fields", "computed": {"loud": "upper(after.note)"}}]
    sink = opened("mirror", tmp_path / "lake", log, steps=steps)
    write(sink, log, ends[0], ends[1], spark)
    write(sink, log, ends[1], ends[2], spark)
    (found,) = mirrored(tmp_path / "lake" / "public.orders")
    assert (found["qty"], found["note"], found["loud"]) == (4, "secret", "SECRET")


def test_a_value_computed_also_from_an_unchanged_column_stops_a_mirror_and_is_marked_in_a_history(
    tmp_path, log
):
    ends = fill(log)
    steps = [{"type": "add_fields", "computed": {"both": "after.note || after.qty"}}]
    sink = opened("mirror", tmp_path / "lake", log, steps=steps)
    write(sink, log, ends[0], ends[1])
    with pytest.raises(TailraceError) as raised:
        write(sink, log, ends[1], ends[2])
    assert raised.value.kind is Kind.TRANSFORM_FAILED
    assert "'both'" in raised.value.message
    assert "secret" not in str(raised.value)
    history = opened("append", tmp_path / "history", log, steps=steps)
    write(history, log, ends[0], ends[2])
    found = rows("append", tmp_path / "history" / "public.orders")
    assert (found[0]["both"], found[2]["both"], found[2]["_unchanged"]) == ("secret3", None, ["note", "both"])


@pytest.mark.parametrize("kind", HISTORIES)
def test_computed_bytes_and_arrays_have_postgresqls_text(kind, tmp_path, log):
    columns = {"id": INT8, "raw": (OIDS["bytea"], -1), "parts": (OIDS["_int4"], -1)}
    table = relation(2, "public.files", columns)
    start = log.writer.tail.offset
    end = log.commit(table, insert(2, 1, "\\x01ff", "{1,NULL,2}"))
    computed = {"bytes": "after.raw", "numbers": "after.parts"}
    sink = opened(kind, tmp_path / "lake", log, steps=[{"type": "add_fields", "computed": computed}])
    write(sink, log, start, end)
    (found,) = rows(kind, tmp_path / "lake" / "public.files")
    assert (found["bytes"], found["numbers"]) == ("\\x01ff", "{1,NULL,2}")


def test_changed_transformations_stop_a_mirror(spark, tmp_path, log, monkeypatch):
    ends = fill(log)
    monkeypatch.setenv("TAILRACE_TEST_SALT", "salt")
    hashed = {"type": "mask", "fields": ["note"], "method": "hash", "salt": "${env:TAILRACE_TEST_SALT}"}
    other_table = {"type": "rename", "fields": {"id": "key"}, "predicate": "items"}
    items = {"items": {"type": "table", "tables": ["public.items"]}}

    def again(*steps: dict[str, Any], end: int) -> None:
        sink = opened("mirror", tmp_path / "lake", log, steps=steps, predicates=items)
        try:
            write(sink, log, sink.position("0") or ends[0], end, spark)
        finally:
            sink.close()

    again(hashed, end=ends[1])
    again(hashed, other_table, end=ends[2])
    for steps in ([], [TOTAL, hashed], [{**hashed, "fields": ["note", "made"]}]):
        with pytest.raises(TailraceError) as raised:
            again(*steps, end=ends[3])
        assert raised.value.kind is Kind.SINK_SCHEMA_REFUSED
        assert "transformations" in raised.value.message
        assert "new, empty path" in raised.value.hint
    monkeypatch.setenv("TAILRACE_TEST_SALT", "another")
    with pytest.raises(TailraceError):
        again(hashed, end=ends[3])
    monkeypatch.setenv("TAILRACE_TEST_SALT", "salt")
    again(hashed, end=ends[3])


def test_transformations_added_to_an_existing_mirror_stop_it(tmp_path, log):
    ends = fill(log)
    sink = opened("mirror", tmp_path / "lake", log)
    write(sink, log, ends[0], ends[1])
    sink.close()
    sink = opened("mirror", tmp_path / "lake", log, steps=STEPS)
    with pytest.raises(TailraceError) as raised:
        write(sink, log, ends[1], ends[2])
    assert raised.value.kind is Kind.SINK_SCHEMA_REFUSED


def test_new_columns_pass_and_columns_that_transformations_read_may_not_change(tmp_path, log):
    ends = fill(log, 1)
    wider = relation(1, "public.orders", {**COLUMNS, "extra": TEXT})
    other = relation(1, "public.orders", {**COLUMNS, "extra": TEXT, "qty": INT8})
    ends.append(log.commit(wider, insert(1, 5, 2, "1.00", "n", None, "more")))
    ends.append(log.commit(other, insert(1, 6, 2, "1.00", "n", None, "more")))
    sink = opened("mirror", tmp_path / "lake", log, steps=STEPS)
    write(sink, log, ends[0], ends[1])
    write(sink, log, ends[1], ends[2])
    found = mirrored(tmp_path / "lake" / "public.orders")
    assert [(row["order_id"], row["total"], row["extra"]) for row in found] == [
        (1, 7.5, None), (2, None, None), (5, 2.0, "more"),
    ]  # fmt: skip
    with pytest.raises(TailraceError) as raised:
        write(sink, log, ends[2], ends[3])
    assert raised.value.kind is Kind.SINK_SCHEMA_REFUSED
    assert "computed" in raised.value.message
    history = opened("append", tmp_path / "history", log, steps=STEPS)
    write(history, log, ends[0], ends[3])
    assert [row["total"] for row in rows("append", tmp_path / "history" / "public.orders")] == [
        7.5, None, 2.0, 2.0,
    ]  # fmt: skip


def test_rows_without_a_key_are_identified_by_their_transformed_values(spark, tmp_path, log):
    described = relation(1, "public.lines", {"id": INT8, "note": TEXT}, key=(), identity="f")
    ends = [log.writer.tail.offset]
    ends.append(log.commit(described, insert(1, 1, "a"), insert(1, 1, "b"), insert(1, 2, "b")))
    ends.append(log.commit(update_whole(1, (1, "b"), (3, "c")), delete_whole(1, 2, "b")))
    steps = [{"type": "drop_fields", "fields": ["note"]}, {"type": "cast", "fields": {"id": "text"}}]
    sink = opened("mirror", tmp_path / "lake", log, keyless="full_row", steps=steps)
    for start, end in itertools.pairwise(ends):
        write(sink, log, start, end, spark)
    assert [row["id"] for row in mirrored(tmp_path / "lake" / "public.lines")] == ["1", "3"]


# ---------------------------------------------------------------------- values


def test_computed_values_of_every_type_keep_their_values(tmp_path, log):
    columns = {
        "id": INT8,
        "f": FLOAT8,
        "n": numeric(12, 3),
        "b": BOOL,
        "d": DATE,
        "z": TIMESTAMPTZ,
        "t": TEXT,
    }
    kinds = ["1e300", "-0.001", "t", "2024-02-29", "2024-01-01 00:00:00.000001+00", "ö'\"\\"]
    odd = ["NaN", "NaN", "f", "-infinity", "infinity", ""]
    ends = [log.writer.tail.offset]
    described = relation(1, "public.kinds", columns)
    ends.append(log.commit(described, insert(1, 1, *kinds), insert(1, 2, *odd), insert(1, 3, *[None] * 6)))
    names = [name for name in columns if name != "id"]
    steps = [{"type": "add_fields", "computed": {f"{name}2": f"after.{name}" for name in names}}]
    for kind in TABLES:
        sink = opened(kind, tmp_path / kind, log, steps=steps)
        write(sink, log, *ends)
        first, second, third = rows(kind, tmp_path / kind / "public.kinds")
        for name in names:
            assert first[name] == first[f"{name}2"], name
            assert third[f"{name}2"] is None
        assert (first["n2"], first["b2"], second["b2"], second["t2"]) == (Decimal("-0.001"), True, False, "")
        assert str(second["f2"]) == "nan"
        special = dict(second["_special"])
        assert special["z"] == special["z2"] == "infinity"
        assert (special["d"], special["d2"]) == ("-infinity", "-infinity")
    jsonl = opened("jsonl", tmp_path / "jsonl", log, steps=steps)
    write(jsonl, log, *ends)
    for row in rows("jsonl", tmp_path / "jsonl" / "public.kinds")[::2]:
        assert [row[name] for name in names] == [row[f"{name}2"] for name in names]
