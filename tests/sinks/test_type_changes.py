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
