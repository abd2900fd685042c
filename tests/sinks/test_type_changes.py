"""Conversion of a mirror's existing values when their column's type changes."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tailrace.decode.postgres_types import OIDS
from tailrace.errors import TailraceError
from tailrace.model import Column, Relation, ReplicaIdentity, ValueType
from tailrace.sinks.delta.evolution import ExistingColumn, mirror_steps
from tailrace.sinks.delta.type_changes import SAME, Coercion, coercion, type_as_json, type_from_json

TEXT, MOMENT, NUMBER = pa.string(), pa.timestamp("us"), pa.float64()


def of(name: str, modifier: int = -1) -> ValueType:
    return ValueType(OIDS[name], modifier)


def numeric(precision: int, scale: int) -> ValueType:
    return ValueType(OIDS["numeric"], (precision << 16 | scale & 0x7FF) + 4)


def array(item: ValueType, oid: int = 20_001) -> ValueType:
    return ValueType(oid, item=item)


def enum(oid: int, **labels: str) -> ValueType:
    return ValueType(oid, name="mood", kind="e", parts=tuple(labels.items()))


def own(
    kind: str, name: str = "t", *parts: tuple[str, str], oid: int = 20_000, modifier: int = -1
) -> ValueType:
    return ValueType(oid, modifier, name, kind=kind, parts=parts)


def _decimals(precision: int, scale: int) -> pa.DataType:
    return pa.list_(pa.decimal128(precision, scale))


@pytest.mark.parametrize(
    ("old", "new", "kind", "expected"),
    [
        (of("bpchar", 9), of("bpchar", 12), TEXT, Coercion(trimmed=True, padded=8)),
        (of("bpchar", 9), of("bpchar"), TEXT, SAME),
        (of("bpchar", 9), of("varchar", 7), TEXT, Coercion(trimmed=True, cut=3)),
        (of("bpchar", 9), of("text"), TEXT, Coercion(trimmed=True)),
        (of("text"), of("bpchar", 9), TEXT, None),
        (of("varchar", 14), of("varchar", 9), TEXT, Coercion(cut=5)),
        (of("varchar", 14), of("varchar", 19), TEXT, SAME),
        (of("text"), of("varchar", 9), TEXT, Coercion(cut=5)),
        (of("text"), of("name"), TEXT, None),
        (numeric(39, 5), numeric(40, 2), TEXT, None),
        (numeric(39, 5), numeric(40, 7), TEXT, None),
        (numeric(39, 5), numeric(44, 5), TEXT, SAME),
        (numeric(39, 5), of("numeric"), TEXT, SAME),
        (of("numeric"), numeric(40, 5), TEXT, None),
        (numeric(10, 2), numeric(10, 1), NUMBER, None),
        (numeric(10, 2), numeric(12, 4), NUMBER, SAME),
        (of("timestamp"), of("timestamp", 6), MOMENT, SAME),
        (of("timestamp", 6), of("timestamp", 3), MOMENT, None),
        (of("timestamp", 3), of("timestamp", 6), MOMENT, SAME),
        (of("interval"), of("interval", 0xFFFF << 16 | 3), TEXT, None),
        (of("bit", 3), of("bit", 5), TEXT, None),
        (of("varbit", 3), of("varbit", 5), TEXT, SAME),
        (of("_timestamp", 6), of("_timestamp", 3), pa.list_(MOMENT), None),
        (of("_bpchar", 9), of("_bpchar", 12), pa.list_(TEXT), None),
        (of("_varchar", 9), of("_varchar", 12), pa.list_(TEXT), SAME),
        (array(numeric(39, 5)), of("_numeric"), pa.list_(TEXT), SAME),
        (array(of("text")), of("text"), TEXT, None),
        (enum(20_000, a="x"), enum(20_000, a="x", b="y"), TEXT, SAME),
        (enum(20_000, a="x"), enum(20_000, a="z", b="x"), TEXT, None),
        (enum(20_000, a="x"), enum(20_001, b="x"), TEXT, SAME),
        (enum(20_000, a="x"), of("text"), TEXT, SAME),
        (of("varchar", 9), enum(20_000, a="x"), TEXT, SAME),
        (own("c", "pair", ("1", "23 -1")), own("c", "pair", ("1", "23 -1"), ("2", "25 -1")), TEXT, None),
        (own("c", "pair", ("1", "23 -1"), ("2", "1700 655366")), of("text"), TEXT, SAME),
        (own("c", "timed", ("1", "23 -1"), ("2", "1184 -1")), of("text"), TEXT, None),
        (own("r", "span"), of("text"), TEXT, None),
        (of("int4range"), of("text"), TEXT, SAME),
        (of("tstzrange"), of("text"), TEXT, None),
        (own("b", "hstore"), of("text"), TEXT, None),
        (of("text"), own("b", "hstore"), TEXT, None),
        (of("text"), own("b", "citext"), TEXT, SAME),
        (own("b", "citext"), of("text"), TEXT, SAME),
        (own("b", modifier=5), own("b", modifier=7), TEXT, None),
        (own("b", modifier=5), own("b"), TEXT, SAME),
        (ValueType(20_000), ValueType(20_000), TEXT, SAME),
        (ValueType(20_000), of("text"), TEXT, None),
        (of("int8"), of("oid"), pa.int64(), None),
    ],
    ids=str,
)  # fmt: skip
def test_values_are_converted_as_postgresql_does_or_the_conversion_is_unknown(
    old: ValueType, new: ValueType, kind: pa.DataType, expected: Coercion | None
) -> None:
    assert coercion(old, new, kind) == expected
    for each in (old, new):
        assert type_from_json(type_as_json(each)) == each


@pytest.mark.parametrize("noted", ["", "{", "[]", '{"oid": 1}', '{"oid": 1, "modifier": 2, "parts": [1]}'])
def test_a_recorded_type_that_cannot_be_read_is_unknown(noted: str) -> None:
    assert type_from_json(noted) is None


def test_a_changed_definition_of_a_type_is_not_reported_as_another_type() -> None:
    def refusal(held: ValueType, now: ValueType) -> str:
        have = [ExistingColumn("m", TEXT, 1, 2, held.oid, held.modifier, held)]
        column = Column("m", now.oid, now.modifier, False, number=2, value_type=now)
        relation = Relation(1, "public", "t", ReplicaIdentity.DEFAULT, (column,))
        with pytest.raises(TailraceError) as refused:
            mirror_steps(have, relation, pa.schema([pa.field("m", TEXT)]), follow=False, context={})
        return refused.value.message

    changed = refusal(enum(20_000, a="x"), enum(20_000, a="z", b="x"))
    assert changed.endswith(
        "'m' has a type whose labels or attributes were changed, and older rows keep them as they were"
    )
    assert "was of type 17 (-1) and is of type 20000 (-1) now" in refusal(of("bytea"), enum(20_000, a="x"))


@pytest.mark.parametrize(
    ("old", "new", "held", "kind", "is_followed"),
    [
        (of("_int4"), of("_int8"), pa.list_(pa.int32()), pa.list_(pa.int64()), True),
        (of("_int8"), of("_int4"), pa.list_(pa.int64()), pa.list_(pa.int32()), False),
        (of("_int4"), of("_float8"), pa.list_(pa.int32()), pa.list_(pa.float64()), False),
        (array(numeric(10, 2)), array(numeric(12, 2)), _decimals(10, 2), _decimals(12, 2), True),
        (array(numeric(10, 2)), array(numeric(12, 4)), _decimals(10, 2), _decimals(12, 4), False),
        (array(numeric(10, 2)), array(of("numeric")), _decimals(10, 2), pa.list_(TEXT), False),
        (numeric(10, 2), of("numeric"), pa.decimal128(10, 2), TEXT, True),
        (numeric(10, 2), numeric(40, 2), pa.decimal128(10, 2), TEXT, True),
        (numeric(10, 2), numeric(40, 4), pa.decimal128(10, 2), TEXT, False),
        (numeric(10, 2), of("text"), pa.decimal128(10, 2), TEXT, False),
    ],
    ids=str,
)
def test_a_wider_type_is_followed_where_the_values_stay_as_postgresql_writes_them(
    old: ValueType, new: ValueType, held: pa.DataType, kind: pa.DataType, is_followed: bool
) -> None:
    have = [ExistingColumn("m", held, 1, 2, old.oid, old.modifier, old)]
    column = Column("m", new.oid, new.modifier, False, number=2, value_type=new)
    relation = Relation(1, "public", "t", ReplicaIdentity.DEFAULT, (column,))
    schema = pa.schema([pa.field("m", kind)])
    if is_followed:
        [step] = mirror_steps(have, relation, schema, follow=False, context={})
        assert step.source == "m"
        return
    with pytest.raises(TailraceError, match="'m' was"):
        mirror_steps(have, relation, schema, follow=False, context={})
