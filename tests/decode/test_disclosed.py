"""What leaves the log: columns, masks and keys, in every form in which changes are read."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import pickle
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.config import ColumnPolicy
from tailrace.decode.changes import TableChanges
from tailrace.decode.column_policy import TablePolicy
from tailrace.decode.values.masks import HASH_LENGTH, hashed_texts
from tailrace.errors import Kind, TailraceError
from tailrace.model import Column, Relation, ReplicaIdentity
from tailrace.protocol import frames
from tailrace.protocol.facts import ColumnFacts, Facts
from tailrace.protocol.renames import Renames
from tests.support.converters.types import numeric
from tests.support.decode.wire import (
    UNCHANGED,
    decode,
    delete,
    insert,
    json_of,
    relation,
    snapshot,
    transaction,
    update,
)

SALT = "Canary: a salt that must be seen nowhere"
HASH = {"columns": ["public.orders.note"], "method": "hash", "salt": "${env:SALT}"}
OID = 16385
USERS = [("id", 23, -1), ("mail", 25, -1), ("age", 23, -1), ("big", 25, -1)]


@pytest.fixture(autouse=True)
def _salt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SALT", SALT)


def hashed(text: str) -> str:
    return hmac.digest(SALT.encode(), text.encode(), hashlib.sha256).hex()


def read(data: bytes, **rules: Any) -> TableChanges:
    [changes] = decode(data, table_policy=TablePolicy.of(ColumnPolicy(**rules)))
    return changes


def refusal(data: bytes, **rules: Any) -> TailraceError:
    with pytest.raises(TailraceError) as caught:
        read(data, **rules)
    assert caught.value.kind is Kind.CONFIG_INVALID
    return caught.value


STORY = transaction(
    relation(columns=USERS),
    insert("1", "a@x", "30", "long"),
    insert("2", None, "31", "long"),
    update("1", "b@x", "32", UNCHANGED),
    update("7", "a@x", "33", UNCHANGED, key=("1", None, None, None)),
    delete("7", None, None, None),
)


def test_an_excluded_column_is_in_no_form() -> None:
    changes = read(STORY, columns_exclude=["public.orders.mail", "*.*.big"])
    rows = changes.rows()
    assert rows.schema.names[:3] == ["id", "age", "_op"]
    assert rows.column("age").to_pylist() == [30, 31, 32, 33, None]
    assert rows.column("_unchanged").to_pylist() == [[]] * 5
    envelope = changes.envelope("0")
    assert dict(envelope.column("after")[0].as_py()) == {"id": "1", "age": "30"}
    lines = json_of(changes)
    assert lines[3]["before"] == {"id": 1}
    assert lines[3]["after"] == {"id": 7, "age": 33}
    assert b"x" not in b"".join(json.dumps(line["after"]).encode() for line in lines)


def test_an_include_list_keeps_the_key_and_leaves_other_tables_alone() -> None:
    changes = read(STORY, columns=["public.orders.mail"])
    assert changes.rows().schema.names[:3] == ["id", "mail", "_op"]
    changes = read(STORY, columns=["public.other.mail"])
    assert changes.rows().schema.names[:5] == ["id", "mail", "age", "big", "_op"]


def with_numbers(*numbered: tuple[str, int]) -> tuple[Relation, Callable[[Renames], TablePolicy]]:
    columns = tuple(Column(name, 25, -1, name == "id", number) for name, number in numbered)
    table = Relation(OID, "public", "orders", ReplicaIdentity.DEFAULT, columns)
    rules = TablePolicy.of(ColumnPolicy(columns=("public.orders.name",)))
    return table, rules.knowing


def test_an_include_list_refers_to_the_first_name_of_a_column() -> None:
    table, knowing = with_numbers(("id", 1), ("title", 2), ("age", 3))
    renamed = Renames({OID: {"2": (("public", "orders", "name"), ("public", "orders", "title"))}})
    assert [column.name for column in knowing(renamed).relation(table).columns] == ["id", "title"]
    moved = Renames({OID: {str(n): (("public", "orders", c), ("public", "people", c))
                           for n, c in ((1, "id"), (2, "name"), (3, "age"))}})  # fmt: skip
    table = dataclasses.replace(
        table, table="people", columns=with_numbers(("id", 1), ("name", 2), ("age", 3))[0].columns
    )
    assert [column.name for column in knowing(moved).relation(table).columns] == ["id", "name"]


def test_an_excluded_column_renamed_to_an_included_name_is_refused() -> None:
    table, knowing = with_numbers(("id", 1), ("name", 3))
    renamed = Renames({OID: {"3": (("public", "orders", "ssn"), ("public", "orders", "name"))}})
    with pytest.raises(TailraceError, match="'name'") as caught:
        knowing(renamed).relation(table)
    assert caught.value.kind is Kind.CONFIG_INVALID


def test_masks_apply_to_every_form_and_to_old_keys() -> None:
    rules = {
        "masks": [
            {"columns": ["public.orders.id", "*.*.mail"], "method": "hash", "salt": "${env:SALT}"},
            {"columns": ["public.orders.age"], "method": "fixed", "value": 0},
            {"columns": ["public.orders.*"], "method": "truncate", "length": 2},
        ]
    }
    changes = read(STORY, **rules)
    rows = changes.rows()
    assert rows.schema.types[:4] == [pa.string(), pa.string(), pa.int32(), pa.string()]
    assert rows.column("id").to_pylist() == [hashed(text) for text in "12177"]
    mails = [hashed("a@x"), None, hashed("b@x"), hashed("a@x"), None]
    assert rows.column("mail").to_pylist() == mails
    assert rows.column("age").to_pylist() == [0, 0, 0, 0, None]
    assert rows.column("big").to_pylist() == ["lo", "lo", None, None, None]
    assert rows.column("_unchanged").to_pylist() == [[], [], ["big"], ["big"], []]
    old = changes.old_keys()
    assert old is not None
    assert old.column("id").to_pylist() == [hashed("1")]
    envelope = changes.envelope("0")
    assert dict(envelope.column("key")[3].as_py()) == {"id": hashed("7")}
    assert dict(envelope.column("before")[3].as_py()) == {"id": hashed("1")}
    assert dict(envelope.column("before")[4].as_py()) == {"id": hashed("7")}
    line = json_of(changes)[3]
    assert line["before"] == {"id": hashed("1")}
    assert line["after"] == {
        "id": hashed("7"), "mail": hashed("a@x"), "age": 0, "big": "__debezium_unavailable_value",
    }  # fmt: skip


def test_old_rows_are_masked_like_new_ones() -> None:
    data = transaction(
        relation(columns=USERS, key=[name for name, _, _ in USERS], identity="f"),
        update("1", "b@x", "32", UNCHANGED, old=("1", "a@x", "30", "long")),
        delete("1", "b@x", "32", "long", mark=b"O"),
    )
    mask = {"columns": ["*.*.mail", "*.*.big"], "method": "hash", "salt": "${env:SALT}"}
    changes = read(data, masks=[mask])
    old = changes.old_rows()
    assert old is not None
    assert old.column("mail").to_pylist() == [hashed("a@x")]
    assert changes.rows().column("big").to_pylist() == [hashed("long")] * 2  # from the old row
    assert [line["before"]["mail"] for line in json_of(changes)] == [hashed("a@x"), hashed("b@x")]


def test_snapshot_rows_are_masked_after_unescaping() -> None:
    text = b"1\ta\\tb\t\\N\tx\n2\t\\N\t5\ty\n"
    data = snapshot(relation(columns=USERS), frames.snapshot_frame(OID, 0, 2, text))
    masks = [HASH | {"columns": ["*.*.mail"]}, {"columns": ["*.*.age"], "method": "fixed"}]
    rows = read(data, masks=masks).rows()
    assert rows.column("mail").to_pylist() == [hashed("a\tb"), None]
    assert rows.column("age").to_pylist() == [None, "****"]


def test_masked_values_are_the_same_as_in_earlier_versions() -> None:
    texts = pa.array(["what do ya want for nothing?", ""])
    assert hashed_texts(texts, b"Jefe").tobytes() == (
        b"5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"  # RFC 4231, test case 2
        b"923598ca6d64af2a5dba79dcd021a8a0fe5c5f557519adaaf0ad532d4506dd30"
    )


@given(st.lists(st.text(max_size=200), max_size=5), st.binary(min_size=1, max_size=200))
def test_hashes_of_texts_of_any_length_equal_the_standard_librarys(texts: list[str], salt: bytes) -> None:
    texts += ["", "x" * 55, "x" * 56, "x" * 63, "x" * 64, "x" * 119, "x" * 120, "é" * 5000]
    said = hashed_texts(pa.array(["skipped", *texts], pa.string())[1:], salt).tobytes().decode()
    expected = [hmac.digest(salt, text.encode(), hashlib.sha256).hex() for text in texts]
    assert [said[at : at + HASH_LENGTH] for at in range(0, len(said), HASH_LENGTH)] == expected
    assert len(hashed_texts(pa.array([], pa.string()), salt)) == 0
    assert hashed_texts(pa.array([""]), salt).tobytes() == expected[len(texts) - 8].encode()


@given(
    st.lists(
        st.one_of(
            st.none(), st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=9)
        )
    ),
    st.integers(0, 5),
)
def test_truncation_counts_characters(values: list[str | None], length: int) -> None:
    shape = relation(columns=[("id", 23, -1), ("note", 25, -1)])
    data = transaction(shape, *(insert(str(at), value) for at, value in enumerate(values)))
    found = decode(
        data,
        table_policy=TablePolicy.of(
            ColumnPolicy.model_validate(
                {"masks": [{"columns": ["*.*.note"], "method": "truncate", "length": length}]}
            )
        ),
    )
    texts = [text for changes in found for text in changes.rows().column("note").to_pylist()]
    assert texts == [None if value is None else value[:length] for value in values]


@pytest.mark.parametrize(
    ("kind", "value", "type_", "found"),
    [
        (23, 7, pa.int32(), 7),
        (23, 1.5, pa.string(), "1.5"),
        (701, 1.5, pa.float64(), 1.5),
        (25, 7, pa.string(), "7"),
        (1082, "2000-01-01", pa.string(), "2000-01-01"),
        (16, None, pa.string(), "****"),
        (21, -32_768, pa.int16(), -32_768),
        (21, 32_768, pa.string(), "32768"),
        (23, 2**31, pa.string(), "2147483648"),
        (20, 2**63, pa.string(), "9223372036854775808"),
        (700, 1e300, pa.string(), "1" + 300 * "0"),
        ((1700, numeric(4, 2)), 99.99, pa.decimal128(4, 2), Decimal("99.99")),
        ((1700, numeric(4, 2)), 100, pa.string(), "100"),
        ((1700, numeric(4, 2)), 0.125, pa.string(), "0.125"),
        ((1700, numeric(30, 10)), 1e-7, pa.decimal128(30, 10), Decimal("0.0000001000")),
        ((1700, -1), 1e300, pa.string(), "1" + 300 * "0"),
    ],
)
def test_a_fixed_number_keeps_the_type_of_a_numeric_column_that_can_hold_it(
    kind: int | tuple[int, int], value: Any, type_: pa.DataType, found: Any
) -> None:
    oid, modifier = kind if isinstance(kind, tuple) else (kind, -1)
    shape = relation(columns=[("id", 23, -1), ("v", oid, modifier)])
    mask = {"columns": ["*.*.v"], "method": "fixed", "value": value}
    rows = read(transaction(shape, insert("1", "1")), masks=[mask]).rows()
    assert (rows.schema.field("v").type, rows.column("v").to_pylist()) == (type_, [found])
    assert rows.column("_special").null_count == 1


def test_the_method_null_removes_values_and_keeps_the_type() -> None:
    rows = read(STORY, masks=[{"columns": ["*.*.age"], "method": None}]).rows()
    assert rows.schema.field("age").type == pa.int32()
    assert rows.column("age").null_count == 5


KEYLESS = [("host", 25, -1), ("ts", 20, -1), ("what", 25, -1)]


def test_a_configured_key_is_the_key() -> None:
    names = [name for name, _, _ in KEYLESS]
    data = transaction(
        relation(columns=KEYLESS, key=names, identity="f"),
        insert("a", "1", "x"),
        update("b", "1", "x", old=("a", "1", "x")),
        delete("b", "1", "x", mark=b"O"),
    )
    changes = read(data, message_keys={"public.ord*": ["ts", "host"]})
    assert changes.relation is not None
    assert changes.relation.key == ("host", "ts")
    assert dict(changes.envelope("0").column("key")[0].as_py()) == {"host": "a", "ts": "1"}
    old = changes.old_keys()
    assert old is not None
    assert old.drop_columns(["_log_offset", "_special"]).to_pylist() == [{"host": "a", "ts": 1}]
    inserts = transaction(relation(columns=KEYLESS, key=(), identity="n"), insert("a", "1", "x"))
    keyed = read(inserts, message_keys={"public.orders": ["host"]}).relation
    assert keyed is not None
    assert keyed.key == ("host",)


def test_rules_that_would_make_keys_equal_or_incomplete_are_refused() -> None:
    hidden = refusal(STORY, columns_exclude=["public.orders.id"])
    assert "columns_exclude leaves out what the table's key needs: 'id'" in hidden.message
    for method in ({"method": "truncate", "length": 1}, {"method": "fixed"}, {"method": "null"}):
        assert "equal, for 'id'" in refusal(STORY, masks=[{"columns": ["*.*.id"], **method}]).message
    assert "the table lacks: 'nowhere'" in refusal(STORY, message_keys={"public.*": ["nowhere"]}).message
    assert "old row: 'mail'" in refusal(STORY, message_keys={"public.*": ["id", "mail"]}).message
    chosen = refusal(
        transaction(relation(columns=KEYLESS, key=(), identity="n"), insert("a", "1", "x")),
        message_keys={"public.*": ["host"]},
        columns_exclude=["*.*.host"],
    )
    assert "needs: 'host'" in chosen.message


def test_salts_are_shown_nowhere_and_are_pickled_with_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    table_policy = TablePolicy.of(ColumnPolicy.model_validate({"masks": [HASH]}))
    assert "Canary" not in repr(table_policy) + repr(table_policy.__dict__)
    carried = pickle.dumps(table_policy)
    monkeypatch.delenv("SALT")
    [changes] = decode(transaction(relation(), insert("1", "a", "2")), table_policy=pickle.loads(carried))  # noqa: S301
    assert changes.rows().column("note").to_pylist() == [hashed("a")]
    with pytest.raises(TailraceError) as caught:
        TablePolicy.of(ColumnPolicy.model_validate({"masks": [HASH]}))
    assert caught.value.kind is Kind.SECRET_MISSING
    monkeypatch.setenv("SALT", "")
    with pytest.raises(TailraceError) as caught:
        TablePolicy.of(ColumnPolicy.model_validate({"masks": [HASH]}))
    assert caught.value.kind is Kind.CONFIG_INVALID


def test_mask_marks_differ_if_the_masks_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    [shape] = decode(transaction(relation(), insert("1", "a", "2")))
    assert shape.relation is not None
    first = TablePolicy.of(ColumnPolicy.model_validate({"masks": [HASH]})).mask_marks(shape.relation)
    assert list(first) == ["note"]
    assert TablePolicy.of(ColumnPolicy.model_validate({"masks": [HASH]})).mask_marks(shape.relation) == first
    monkeypatch.setenv("SALT", "another")
    assert TablePolicy.of(ColumnPolicy.model_validate({"masks": [HASH]})).mask_marks(shape.relation) != first


def test_the_value_of_older_rows_in_an_added_column_is_masked() -> None:
    column = ColumnFacts("mail", number=2, type="text", type_oid=25, base_oid=25, missing="T0P-SECRET")
    facts = Facts(OID, "public", "orders", ("id",), (ColumnFacts("id", 1, type_oid=23, base_oid=23), column))
    data = frames.control_frame(frames.FACTS, 0, 0, facts.as_json())
    data += transaction(relation(columns=USERS[:2]), insert("1", "a@x"))

    def missing(**mask: Any) -> str | None:
        let_out = read(data, masks=[{"columns": ["*.*.mail"], **mask}]).relation
        assert let_out is not None
        return let_out.columns[1].missing

    assert read(data).relation.columns[1].missing == "T0P-SECRET"
    assert missing(method="hash", salt="${env:SALT}") == hashed("T0P-SECRET")
    assert missing(method="fixed") == "****"
    assert missing(method="truncate", length=3) == "T0P"
    assert missing(method="null") is None
    left_out = read(data, columns_exclude=["*.*.mail"]).relation
    assert [each.name for each in left_out.columns] == ["id"]
    assert "T0P" not in repr(left_out)


@pytest.mark.parametrize("method", ["hash", "fixed", "truncate"])
def test_masks_copy_only_the_bytes_of_their_own_table(method: str) -> None:
    """Each table was given a copy of the whole block: memory grew with the square of the tables."""
    tables = 50
    oids = range(OID, OID + tables)
    shapes = [relation(oid, f"t{oid}") for oid in oids]
    rows = [insert(turn, f"note {oid}", None, oid=oid) for turn in range(3) for oid in oids]
    block = transaction(*shapes, *rows)
    options: dict[str, dict[str, Any]] = {
        "hash": {"salt": "${env:SALT}"}, "fixed": {}, "truncate": {"length": 4},
    }  # fmt: skip
    masks = [{"columns": ["public.t*.note"], "method": method, **options[method]}]
    found = decode(block, table_policy=TablePolicy.of(ColumnPolicy.model_validate({"masks": masks})))
    assert len(found) == tables
    for oid, changes in zip(oids, found, strict=True):
        masked = {"hash": hashed(f"note {oid}"), "fixed": "****", "truncate": "note"}[method]
        assert changes.rows().column("note").to_pylist() == [masked] * 3
        assert changes.rows().column("id").to_pylist() == [0, 1, 2]
        assert pickle.loads(pickle.dumps(changes)).rows() == changes.rows()  # noqa: S301 - its own
    assert sum(len(changes.tuples().buffer) for changes in found) <= 2 * len(block)
