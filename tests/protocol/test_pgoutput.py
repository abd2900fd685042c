"""Messages that describe tables are read as they were written."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.model import Column, Relation, ReplicaIdentity
from tailrace.protocol.pgoutput import parse_relation, parse_type, relation_message, type_message

OIDS = st.integers(1, 2**32 - 1)
NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=63)
COLUMNS = st.builds(Column, NAMES, OIDS, st.integers(-1, 2**31 - 1), st.booleans())
RELATIONS = st.builds(
    Relation,
    OIDS,
    st.one_of(st.just("pg_catalog"), NAMES),
    NAMES,
    st.sampled_from(ReplicaIdentity),
    st.lists(COLUMNS, unique_by=lambda column: column.name, max_size=9).map(tuple),
)


@given(RELATIONS)
def test_a_relation_message_is_read_as_written(relation: Relation) -> None:
    assert parse_relation(relation_message(relation)) == relation


@given(OIDS, NAMES, NAMES)
def test_a_type_message_is_read_as_written(oid: int, schema: str, name: str) -> None:
    assert parse_type(type_message(oid, schema, name)) == (oid, schema, name)
