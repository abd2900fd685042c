"""Columns renamed, dropped, masked, added and cast: the same on frames, in Arrow and record by record."""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import json
import math
import pickle
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.converters.debezium import JsonConverter
from tailrace.errors import Kind, TailraceError
from tailrace.records.batch import Batch
from tailrace.records.group import Group
from tailrace.records.making import SourceRecord
from tests.support.decode.wire import UNCHANGED, Cell, delete, insert, json_of, update
from tests.support.transforms.groups import COMMIT_US, applied, messages, only, orders, plain, rows

SALT = "0123456789abcdef"
Row = dict[str, Any]


def decoded(group: Group) -> Group:
    """Return the same records without their frames."""
    return Group.of_columns(group.topic, group.index, group.columns, group.relation)


def envelope(groups: list[Group]) -> dict[int, Row]:
    return rows(groups, "op", "key", "before", "after", "special", "unchanged")


CELLS = st.tuples(
    st.integers(0, 3).map(str),
    st.sampled_from(["", "é€x", "plain", None, UNCHANGED]),
    st.sampled_from(["5.00", "NaN", None, "-1.25"]),
)


def _sent(cells: tuple[Cell, ...]) -> tuple[Cell, ...]:
    return tuple("sent" if cell is UNCHANGED else cell for cell in cells)


CHANGES = st.lists(
    st.one_of(
        CELLS.map(lambda cells: insert(*_sent(cells))),
        CELLS.map(lambda cells: update(*cells)),
        CELLS.map(lambda cells: update(*cells, key=("9", None, None))),
        CELLS.map(lambda cells: update(*_sent(cells), old=_sent(cells))),
        CELLS.map(lambda cells: delete(cells[0], None, None)),
    ),
    min_size=1,
    max_size=6,
)

ALIKE = [
    {"type": "rename", "fields": {"note": "remark", "id": "number"}},
    {"type": "drop_fields", "fields": ["no*"]},
    {"type": "drop_fields", "keep": ["id", "price"]},
    {"type": "mask", "fields": ["note"], "method": "truncate", "length": 2},
    {"type": "mask", "fields": ["note"], "value": "?"},
    {"type": "mask", "fields": ["note"], "method": "null"},
    {"type": "mask", "fields": ["note", "id"], "method": "hash", "salt": "${env:SHAPE_SALT}"},
    {"type": "mask", "fields": ["price"], "method": "hash", "salt": "${env:SHAPE_SALT}"},
    {"type": "mask", "fields": ["price"], "method": "truncate", "length": 2},
    {"type": "mask", "fields": ["pri*"], "value": 0.5},
    {"type": "mask", "fields": ["id", "price"], "value": 10**12},
    {"type": "mask", "fields": ["price"], "value": 0.125},
    {"type": "mask", "fields": ["price"], "value": "?"},
    {"type": "mask", "fields": ["price"], "method": "null"},
]


@pytest.fixture(autouse=True)
def _salt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHAPE_SALT", SALT)


@pytest.mark.parametrize("given_", ALIKE, ids=str)
def test_frames_and_arrow_are_edited_alike(given_: Row) -> None:
    @given(CHANGES)
    def alike(changes: list[bytes]) -> None:
        group = orders(*changes)
        on_wire, in_arrow = applied(group, given_), applied(decoded(group), given_)
        assert only(on_wire).wire is not None
        assert only(in_arrow).wire is None
        assert envelope(on_wire) == envelope(in_arrow)
        relations = only(on_wire).relation, only(in_arrow).relation
        assert relations[0] == relations[1]

    alike()


def test_edited_frames_are_converted_with_the_edits() -> None:
    chain = (
        {"type": "rename", "fields": {"note": "remark"}},
        {"type": "mask", "fields": ["remark"], "value": "***"},
        {"type": "drop_fields", "fields": ["price"]},
        {"type": "rename", "fields": {"id": "number"}},
    )
    found = only(applied(orders(), *chain))
    assert found.wire is not None
    assert [line["after"] for line in json_of(found.wire)] == [
        {"number": 1, "remark": "***"},
        {"number": 2, "remark": "***"},
        {"number": 1, "remark": "__debezium_unavailable_value"},
        {"number": 3, "remark": "***"},
        None,
    ]
    assert [line["before"] for line in json_of(found.wire)][3:] == [{"number": 2}, {"number": 1}]
    assert found.relation is not None
    assert found.relation.key == ("number",)
    again = only(applied(found.take(np.array([3])), {"type": "filter", "where": "after.number = 3"}))
    assert json_of(again.wire)[0]["after"] == {"number": 3, "remark": "***"}  # type: ignore[arg-type]


def test_a_table_that_no_transformation_concerns_is_not_decoded() -> None:
    group = orders()
    none = ["nothing", "*_email"]
    edits = (
        {"type": "mask", "fields": none},
        {"type": "drop_fields", "fields": none},
        {"type": "rename", "fields": {"nothing": "x"}},
        {"type": "cast", "fields": {"nothing": "text"}},
        {"type": "timestamps", "fields": none, "to": "date"},
    )
    assert only(applied(group, *edits)) is group


def test_rows_and_keys_may_be_edited_separately() -> None:
    found = envelope(applied(orders(), {"type": "rename", "fields": {"id": "k"}, "apply_to": "key"}))
    assert found[4]["key"] == {"k": 1}
    assert found[0]["after"] == {"id": 1, "note": "first", "price": Decimal("5.00")}
    found = envelope(applied(orders(), {"type": "drop_fields", "fields": ["id"]}))
    assert found[0]["key"] == {"id": 1}
    assert set(found[0]["after"]) == {"note", "price"}
    found = envelope(applied(orders(), {"type": "mask", "fields": ["id"], "value": 0, "apply_to": "row"}))
    assert (found[0]["key"], found[0]["after"]["id"]) == ({"id": 1}, 0)


def test_two_columns_of_one_name_are_refused() -> None:
    with pytest.raises(TailraceError, match="two called 'price'") as caught:
        applied(orders(), {"type": "rename", "fields": {"note": "price"}})
    assert caught.value.kind is Kind.TRANSFORM_FAILED
    swapped = envelope(applied(orders(), {"type": "rename", "fields": {"note": "price", "price": "note"}}))
    assert swapped[0]["after"] == {"id": 1, "price": "first", "note": Decimal("5.00")}
    assert (swapped[2]["unchanged"], swapped[1]["special"]) == (["price"], [("after.note", "NaN")])


def test_masks_of_plain_values() -> None:
    group = plain(
        [{"a": "x", "n": 5, "d": Decimal("1.50")}, None, {"a": None, "n": None, "d": None}],
        key=pa.array([{"a": "x"}, {"a": "y"}, None]),
    )
    mask = {"type": "mask", "fields": ["a", "n", "d"]}
    found = rows(applied(group, {**mask, "value": 7}))
    assert [row["value"] for row in found.values()] == [
        {"a": "7", "n": 7, "d": Decimal("7.00")},
        None,
        {"a": None, "n": None, "d": None},
    ]
    found = rows(applied(group, {**mask, "method": "hash", "salt": "${env:SHAPE_SALT}"}))
    expected = {
        c: hmac.digest(SALT.encode(), c.encode(), hashlib.sha256).hex() for c in ("x", "y", "5", "1.50")
    }
    assert found[0]["value"] == {"a": expected["x"], "n": expected["5"], "d": expected["1.50"]}
    assert [row["key"] for row in found.values()] == [{"a": expected["x"]}, {"a": expected["y"]}, None]
    with pytest.raises(TailraceError, match="can't be written as text"):
        applied(plain([{"a": {"b": 1}}]), {**mask, "method": "truncate", "length": 1})


def test_a_salt_is_shown_nowhere() -> None:
    from tailrace.transforms.factory import build

    chain = build([{"type": "mask", "fields": ["note"], "method": "hash", "salt": "${env:SHAPE_SALT}"}])
    assert SALT not in repr(chain)
    again = pickle.loads(pickle.dumps(chain))  # noqa: S301
    assert envelope(again.apply(orders())) == envelope(chain.apply(orders()))


def test_fields_are_added_to_rows() -> None:
    added = {
        "type": "add_fields",
        "static": {"region": "it's", "one": 1, "half": 0.5, "yes": True, "none": None},
        "metadata": {
            "t": "table",
            "at": "source.ts_ms",
            "when": "commit_time",
            "seq": "sequence",
            "snap": "snapshot",
        },
        "computed": {"total": "after.price * 2", "note": "upper(after.note)"},
    }
    found = envelope(applied(orders(), added))
    assert found[0]["after"] == {
        "id": 1,
        "note": "FIRST",
        "price": Decimal("5.00"),
        "region": "it's",
        "one": 1,
        "half": 0.5,
        "yes": True,
        "none": None,
        "t": "orders",
        "at": COMMIT_US // 1000,
        "when": dt.datetime.fromtimestamp(COMMIT_US / 1e6, dt.UTC),
        "seq": '["1000","100"]',
        "snap": "false",
        "total": Decimal("10.00"),
    }
    assert found[4]["after"] is None
    assert found[4]["before"]["total"] is None
    # A value that replaces an unchanged one is no longer marked as unchanged.
    assert found[2]["unchanged"] == []
    keyless = applied(orders(insert("1", "a", "2"), key=()), {**added, "apply_to": "key"})
    assert rows(keyless)[0]["key"]["region"] == "it's"


def test_metadata_that_the_connector_does_not_give_is_null() -> None:
    batch = Batch.of_records([SourceRecord(topic="t", offset={}, op="c", after={"id": 1})])
    names = ("connector", "name", "db", "version")
    added = {"type": "add_fields", "metadata": {name: name for name in names}}
    assert rows(applied(batch.groups[0], added))[0]["after"] == {"id": 1, **dict.fromkeys(names)}


def test_a_cast_keeps_the_special_texts_and_its_error_shows_no_value() -> None:
    found = envelope(
        applied(orders(), {"type": "cast", "fields": {"id": "text", "price": "double precision"}})
    )
    assert (found[3]["key"], found[3]["after"]["price"]) == ({"id": "3"}, 9.0)
    assert found[1]["special"] == [("after.price", "NaN")]
    with pytest.raises(TailraceError, match=r"cast the column 'note' from string to integer") as caught:
        applied(orders(), {"type": "cast", "fields": {"note": "integer"}})
    assert "first" not in str(caught.value)
    assert caught.value.kind is Kind.TRANSFORM_FAILED


def test_all_columns_of_frames_may_be_dropped() -> None:
    for which in ({"fields": ["*"]}, {"keep": ["nothing"]}):
        found = JsonConverter().convert(only(applied(orders(), {"type": "drop_fields", **which})))
        assert [json.loads(text)["after"] for text in found.values.to_pylist()[:4]] == [{}] * 4
        assert found.keys.to_pylist()[3] == '{"id":3}'


@pytest.mark.parametrize(
    ("fields", "key"),
    [({"content"}, '{"prefix":"audit"}'), ({"prefix"}, None), ({"prefix", "content"}, None)],
)
def test_the_fields_of_a_logical_message_may_be_dropped(fields: set[str], key: str | None) -> None:
    dropped = only(applied(messages(b"x"), {"type": "drop_fields", "fields": sorted(fields)}))
    events = JsonConverter().convert(dropped)
    [value] = map(json.loads, events.values.to_pylist())
    assert value["message"].keys() == {"prefix", "content"} - fields
    assert (events.keys and events.keys.to_pylist()) == (key and [key])
    [text] = JsonConverter(schemas_enable=True).convert(dropped).values.to_pylist()
    [block] = [field for field in json.loads(text)["schema"]["fields"] if field["field"] == "message"]
    assert {field["field"] for field in block["fields"]} == value["message"].keys()


TIMES = [
    ("unix_ms", 1_700_000_000_123, "unix_us", 1_700_000_000_123_000),
    ("unix_ms", -1, "unix_s", -1),
    ("unix_ms", 1_700_000_000_123, "string", "2023-11-14T22:13:20.123000Z"),
    ("unix_ms", 1_700_000_000_123, "date", dt.date(2023, 11, 14)),
    ("unix_ms", 1_700_000_000_123, "time", dt.time(22, 13, 20, 123_000)),
    ("unix_ms", 0, "timestamp", dt.datetime(1970, 1, 1, tzinfo=dt.UTC)),
    ("iso", "2023-11-14T22:13:20.5Z", "unix_ns", 1_700_000_000_500_000_000),
    ("iso", "2023-11-14 23:13:20+01", "unix_s", 1_700_000_000),
    ("iso", "2023-11-14", "unix_s", 1_699_920_000),
    ("date", dt.date(2023, 11, 14), "unix_ms", 1_699_920_000_000),
    ("stamp", dt.datetime(2023, 11, 14, 1, 2, 3, 4), "string", "2023-11-14T01:02:03.000004Z"),  # noqa: DTZ001
]


@pytest.mark.parametrize(("kind", "value", "to", "expected"), TIMES)
def test_timestamps_are_converted_between_forms(kind: str, value: Any, to: str, expected: Any) -> None:
    group = plain([{"t": value}, {"t": None}], key=pa.array([{"t": value}, None]))
    found = rows(applied(group, {"type": "timestamps", "fields": ["t"], "to": to}))
    assert [found[0]["value"], found[1]["value"]] == [{"t": expected}, {"t": None}]
    assert [found[0]["key"], found[1]["key"]] == [{"t": expected}, None]


@pytest.mark.parametrize("to", ["timestamp", "date", "time", "string"])
@pytest.mark.parametrize(("unit", "value"), [("s", 2**63 // 1000), ("ms", 1_700_000_000 * 10**9)])
def test_a_timestamp_out_of_range_is_refused(unit: str, value: int, to: str) -> None:
    with pytest.raises(TailraceError, match="out of range"):
        applied(plain([{"t": value}]), {"type": "timestamps", "fields": ["t"], "unit": unit, "to": to})


def test_parts_of_a_microsecond_before_1970_are_rounded_down() -> None:
    def found(to: str) -> Any:
        step = {"type": "timestamps", "fields": ["t"], "unit": "ns", "to": to}
        return rows(applied(plain([{"t": -1}]), step))[0]["value"]["t"]

    last = dt.datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=dt.UTC)
    assert [found(to) for to in ("unix_us", "timestamp", "time")] == [-1, last, last.time()]
    assert found("string") == "1969-12-31T23:59:59.999999Z"


def test_an_infinite_timestamp_has_no_number() -> None:
    texts = plain([{"t": "infinity"}])
    found = only(applied(texts, {"type": "timestamps", "fields": ["t"], "to": "date"}))
    assert found.column("value").field("t").cast(pa.int32()).to_pylist() == [2**31 - 1]
    for to in ("unix_ms", "string", "time"):
        with pytest.raises(TailraceError, match="not a point in time"):
            applied(texts, {"type": "timestamps", "fields": ["t"], "to": to})


def test_a_year_of_six_digits_is_written_completely() -> None:
    converted = {"type": "timestamps", "fields": ["t"], "to": "string"}
    texts = {
        "294246-12-31 23:59:59.999999": "+294246-12-31T23:59:59.999999Z",
        "0044-03-15 00:00:00 BC": "-0043-03-15T00:00:00.000000Z",
    }
    for text, written in texts.items():
        group = orders(insert("1", text), columns=[("id", 23, -1), ("t", 1114, -1)])
        assert envelope(applied(group, converted))[0]["after"]["t"] == written
        if text[0] == "2":
            with pytest.raises(TailraceError, match="out of range"):
                applied(group, {**converted, "format": "%Y"})


def test_times_are_read_and_written_by_a_format() -> None:
    converted = {"type": "timestamps", "fields": ["t"], "read_format": "%d.%m.%Y %H:%M", "to": "string"}
    found = rows(applied(plain([{"t": "14.11.2023 22:13"}]), {**converted, "format": "%Y/%m/%d %H-%M-%S"}))
    assert found[0]["value"] == {"t": "2023/11/14 22-13-00"}
    for bad in ("never", "14.11.2023", "30.02.2024 10:00", "31.11.2023 10:00", "00.11.2023 10:00"):
        with pytest.raises(TailraceError, match="not a point in time") as caught:
            applied(plain([{"t": bad}]), converted)
        assert bad not in str(caught.value)


@pytest.mark.parametrize(
    ("read_format", "text", "read"),
    [
        ("%Y-%m-%d", "2024-02-29", "2024-02-29 00:00"),
        ("%Y-%m-%d", "2023-02-29", None),
        ("%D", "02/30/24", None),
        ("%d %B %Y", "31 April 2024", None),
        ("%Y-%m-%d %H:%M %z", "2024-03-01 00:30 +0200", "2024-02-29 22:30"),
        ("%z %Y-%m-%d", "-0500 2024-12-31", "2024-12-31 05:00"),
        ("%z %Y-%m-%d", "-0500 2024-11-31", None),
        ("%Y %j", "2024 366", "2024-12-31 00:00"),
        ("%Y %j", "2023 366", None),
        ("%Y %U %w", "2024 10 1", "2024-03-11 00:00"),
    ],
)
def test_an_invalid_day_of_a_month_or_year_is_refused(read_format: str, text: str, read: str | None) -> None:
    step = {"type": "timestamps", "fields": ["t"], "read_format": read_format, "to": "string"}
    group = plain([{"t": text}, {"t": None}])
    if read is None:
        with pytest.raises(TailraceError, match="not a point in time"):
            applied(group, step)
        return
    found = rows(applied(group, {**step, "format": "%Y-%m-%d %H:%M"}))
    assert [row["value"]["t"] for row in found.values()] == [read, None]


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ({"type": "drop_fields"}, "needs either fields or keep"),
        ({"type": "mask", "fields": ["a"], "method": "hash"}, "hash needs a salt"),
        ({"type": "mask", "fields": ["a"], "length": 3}, "length belongs to the method truncate"),
        ({"type": "mask", "fields": ["a", "a"]}, "different names"),
        ({"type": "cast", "fields": {"a": "money"}}, "there is no type 'money'"),
        ({"type": "add_fields"}, "needs static, metadata or computed"),
        ({"type": "add_fields", "static": {"a": 2**63}}, "static.a: must be a whole number of 64 bits"),
        ({"type": "add_fields", "static": {"a": math.inf}}, "static.a: must be text, a number, true"),
        ({"type": "add_fields", "static": {"a": dt.date(2024, 2, 29)}}, "static.a: must be text, a number"),
        ({"type": "add_fields", "static": {"a": 1}, "metadata": {"a": "op"}}, "must not have a name twice"),
        ({"type": "add_fields", "metadata": {"a": "oop"}}, "must be one of op, topic"),
        ({"type": "timestamps", "fields": ["a"], "to": "string", "format": "%f"}, "does not support %f"),
        ({"type": "rename", "fields": {}}, "at least 1"),
    ],
)
def test_invalid_options_are_refused(given_: Row, words: str) -> None:
    with pytest.raises(TailraceError, match=words) as caught:
        applied(orders(), given_)
    assert caught.value.kind is Kind.CONFIG_INVALID


def test_all_columns_of_a_row_may_be_dropped() -> None:
    found = envelope(applied(decoded(orders()), {"type": "drop_fields", "fields": ["*"]}))
    assert [row["after"] for row in found.values()] == [{}, {}, {}, {}, None]
    on_wire = envelope(applied(orders(), {"type": "drop_fields", "fields": ["*"]}))
    assert [row["after"] for row in on_wire.values()] == [{}, {}, {}, {}, None]
    assert on_wire[0]["key"] == {"id": 1}
