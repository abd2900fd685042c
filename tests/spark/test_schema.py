"""One schema over all versions of a table."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from tailrace.decode.types import METADATA
from tailrace.errors import Kind, TailraceError
from tailrace.protocol import frames
from tailrace.protocol.facts import ColumnFacts, Facts
from tailrace.spark.schema import relations, table_schema, to_arrow, to_spark, widened
from tests.support.spark.wire import (
    BOOL,
    DATE,
    FLOAT8,
    INT4,
    INT8,
    TEXT,
    TIMESTAMP,
    TIMESTAMPTZ,
    numeric,
    relation,
)

PRICE = 20_000

METADATA_DDL = (
    "_op string, _commit_lsn bigint, _ordinal bigint, _xid bigint, _commit_ts timestamp, _log_offset bigint, "
    "_unchanged array<string>, _special map<string,string>"
)


def own(*versions: bytes) -> dict[str, pa.DataType]:
    schema = table_schema(relations(versions), "public.t")
    return {field.name: field.type for field in list(schema)[: -len(METADATA)]}


def test_the_schema_has_the_columns_of_all_versions_in_order_of_appearance() -> None:
    first = relation(1, "public.t", {"id": INT8, "gone": TEXT})
    second = relation(1, "public.t", {"id": INT8, "new": BOOL})
    assert own(first, second) == {"id": pa.int64(), "gone": pa.string(), "new": pa.bool_()}


def test_a_recreated_table_is_the_same_table() -> None:
    assert list(own(relation(1, "public.t", {"id": INT8}), relation(2, "public.t", {"a": INT8}))) == [
        "id",
        "a",
    ]


def priced(version: int, columns: dict[str, int | tuple[int, int]], pending: int = 0) -> list[bytes]:
    """Return the frames of a version of a table. Pending facts do not describe the domain of `price`."""
    names = {} if pending else {str(PRICE): {"base": 1700, "modifier": numeric(12, 2)[1], "name": "price"}}
    listed = tuple(
        ColumnFacts(name, number, types=names if name == "price" else {})
        for number, name in enumerate(columns, start=1)
    )
    facts = Facts(1, "public", "t", ("id",), listed, version, pending=pending)
    return [frames.control_frame(frames.FACTS, 1, 0, facts.as_json()), relation(1, "public.t", columns)]


def test_a_column_of_a_domain_keeps_its_type_when_it_is_dropped() -> None:
    versions = [*priced(1, {"id": INT8, "price": PRICE}), *priced(2, {"id": INT8})]
    assert own(*versions) == {"id": pa.int64(), "price": pa.decimal128(12, 2)}


def test_late_facts_determine_the_type_of_a_column() -> None:
    columns: dict[str, int | tuple[int, int]] = {"id": INT8, "price": PRICE}
    late, _ = priced(2, columns)
    versions = [*priced(1, {"id": INT8}), *priced(2, columns, pending=7), late]
    known = relations(versions, settled={(1, 2): late})
    assert table_schema(known, "public.t").field("price").type == pa.decimal128(12, 2)


@pytest.mark.parametrize(
    ("one", "other", "wide"),
    [
        (pa.int16(), pa.int64(), pa.int64()),
        (pa.int32(), pa.int16(), pa.int32()),
        (pa.float32(), pa.float64(), pa.float64()),
        (pa.decimal128(10, 2), pa.decimal128(12, 4), pa.decimal128(12, 4)),
        (pa.decimal128(10, 0), pa.decimal128(4, 4), pa.decimal128(14, 4)),
        (pa.decimal128(38, 0), pa.decimal128(38, 38), pa.string()),
        (pa.int32(), pa.decimal128(12, 2), pa.decimal128(12, 2)),
        (pa.int64(), pa.decimal128(12, 2), pa.decimal128(21, 2)),
        (pa.int16(), pa.float32(), pa.float32()),
        (pa.int32(), pa.float32(), pa.float64()),
        (pa.int32(), pa.float64(), pa.float64()),
        (pa.int64(), pa.float64(), pa.string()),  # 2**53 + 1 has no exact float
        (pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.string()),
        (pa.date32(), pa.timestamp("us"), pa.string()),
        (pa.list_(pa.int16()), pa.list_(pa.int64()), pa.list_(pa.int64())),
        (pa.list_(pa.int16()), pa.list_(pa.bool_()), pa.string()),
        (pa.bool_(), pa.int32(), pa.string()),
    ],
)
def test_types_are_widened_only_without_loss(one: pa.DataType, other: pa.DataType, wide: pa.DataType) -> None:
    assert widened(one, other) == wide
    assert widened(other, one) == wide
    assert widened(wide, one) == wide


def test_spark_has_the_types_of_the_database() -> None:
    columns = {"id": INT4, "n": numeric(12, 2), "at": TIMESTAMPTZ, "local": TIMESTAMP, "d": DATE, "f": FLOAT8}
    schema = to_spark(table_schema(relations([relation(1, "public.t", columns)]), "public.t"))  # type: ignore[arg-type]
    ddl = "id int, n decimal(12,2), at timestamp, local timestamp_ntz, d date, f double, " + METADATA_DDL
    found = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in schema)
    assert found == ddl
    assert to_spark(to_arrow(schema)) == schema


def test_an_unknown_table_is_refused_with_the_known_ones() -> None:
    known = relations([relation(1, "public.orders", {"id": INT8}), relation(2, "public.zoo", {"id": INT8})])
    with pytest.raises(TailraceError) as caught:
        table_schema(known, "public.order")
    assert caught.value.kind is Kind.TABLE_UNKNOWN
    assert caught.value.hint.startswith("similar or known here: public.orders")


def test_two_tables_with_the_same_name_for_the_option_are_refused() -> None:
    known = relations([relation(1, "a.b.c", {"id": INT8})])
    known += [replace(each, schema="a.b", table="c") for each in known]
    with pytest.raises(TailraceError, match=r"schemas a, a\.b have such a table") as caught:
        table_schema(known, "a.b.c")
    assert "envelopes" in caught.value.hint
