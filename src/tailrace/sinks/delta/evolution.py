"""Computes the steps from a mirror's columns to those that its table has now.

A target's columns have, as metadata of their fields, their column in the source (`tailrace.column`):
oid of the table, number and type of the column. So the target itself records which schema changes it
has followed, a rename is distinguished from a drop and an addition, and steps are idempotent.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import pyarrow as pa
from deltalake import Schema as DeltaSchema

from tailrace.decode.postgres_types import FIRST_NOT_BUILT_IN, OIDS, item_of
from tailrace.decode.types import known_type, numeric_shape, value_of
from tailrace.errors import Kind, TailraceError
from tailrace.model import Column, Relation, ValueType
from tailrace.sinks.delta.shapes import ShapeStep
from tailrace.sinks.delta.type_changes import SAME, Coercion, coercion, type_as_json, type_from_json

_COLUMN = b"tailrace.column"

_TYPE = b"tailrace.type"

_INTEGERS = frozenset(OIDS[name] for name in ("int2", "int4", "int8"))
_FLOATS = frozenset({OIDS["float4"], OIDS["float8"]})
_NUMERIC, _DATE, _TIMESTAMP = OIDS["numeric"], OIDS["date"], OIDS["timestamp"]
_TEXTS = frozenset({OIDS["text"], OIDS["varchar"]})


@dataclass(frozen=True, slots=True)
class ExistingColumn:
    """A column of a target or of a file of changes. Unknown numbers are 0."""

    name: str
    kind: pa.DataType
    relation: int = 0
    number: int = 0
    type_oid: int = 0
    type_modifier: int = -1
    type: ValueType | None = None  # with domains resolved


def held_columns(schema: pa.Schema) -> list[ExistingColumn]:
    """Return the columns of a target, from the metadata of its fields."""
    found = []
    for field in schema:
        parts = (field.metadata or {}).get(_COLUMN, b"").decode().split(".")
        numbers = [int(part) for part in parts] if len(parts) == 4 else [0, 0, 0, -1]
        noted = type_from_json((field.metadata or {}).get(_TYPE, b"").decode())
        if noted is None and 0 < numbers[2] < FIRST_NOT_BUILT_IN:
            noted = ValueType(numbers[2], numbers[3])
        relation, number, type_oid, modifier = numbers
        found.append(ExistingColumn(field.name, field.type, relation, number, type_oid, modifier, noted))
    return found


def held_in_file(relation: Relation, schema: pa.Schema) -> list[ExistingColumn]:
    """Return the columns of a file of changes of `relation`."""
    return [
        ExistingColumn(
            c.name,
            schema.field(c.name).type,
            relation.oid,
            c.number,
            c.type_oid,
            c.type_modifier,
            known_type(c),
        )
        for c in relation.columns
    ]


def described(schema: pa.Schema, relation: Relation) -> pa.Schema:
    """Return `schema` with the metadata that `held_columns` reads."""
    columns = {column.name: column for column in relation.columns}
    fields = []
    for field in schema:
        column = columns.get(field.name)
        if column is not None:
            place = f"{relation.oid}.{column.number}.{column.type_oid}.{column.type_modifier}"
            metadata = {_COLUMN: place.encode()}
            if column.value_type is not None:
                metadata[_TYPE] = type_as_json(column.value_type).encode()
            field = field.with_metadata(metadata)  # noqa: PLW2901
        fields.append(field)
    return pa.schema(fields, schema.metadata)


def same_type(one: pa.DataType, other: pa.DataType) -> bool:
    """Return whether both are the same type in Delta: Arrow has several types for strings and lists."""
    return one == other or bool(
        DeltaSchema.from_arrow(pa.schema([pa.field("c", one)]))
        == DeltaSchema.from_arrow(pa.schema([pa.field("c", other)]))
    )


def mirror_steps(
    have: Sequence[ExistingColumn],
    relation: Relation,
    schema: pa.Schema,
    *,
    follow: bool,
    context: dict[str, str],
) -> list[ShapeStep]:
    """Return the steps that convert rows with the columns `have` to those of `relation`.

    :param schema: of the relation's own columns.
    :param follow: convert rows as far as possible if they can't be converted exactly, instead of refusing.
    :raises TailraceError: `SINK_SCHEMA_REFUSED`.
    """
    by_number = {column.number: column for column in have if column.number}
    by_name = {column.name: column for column in have}
    noted = described(schema, relation)
    steps = []
    for column in relation.columns:
        field = schema.field(column.name).with_metadata(noted.field(column.name).metadata)
        old = by_number.get(column.number) if column.number else None
        if old is None:
            namesake = by_name.get(column.name)
            nameless = column.unknown and not column.number  # the column's identity is unknown
            if namesake is not None and (not namesake.number or not column.number) and not nameless:
                old = namesake
        if old is None:
            steps.append(_filled(relation, column, field, follow=follow, context=context))
            continue
        how = _followed(old, column, field.type)
        if how is None and not follow:
            _refuse_type(column.name, old.kind, field.type, old, column, context)
        # Without `follow` a value that does not fit stops the sink.
        # Decimals become PostgreSQL's text with that of NaN, and this is what `lenient` means for a text.
        is_written = pa.types.is_decimal(old.kind) and pa.types.is_string(field.type)
        lenient = how is None or is_written or (follow and not same_type(old.kind, field.type))
        step = ShapeStep(field, old.name, lenient=lenient, coerced=how or SAME)
        steps.append(step)
    return steps


def changes_nothing(have: Sequence[ExistingColumn], steps: Sequence[ShapeStep]) -> bool:
    """Return whether rows with these columns already have the schema of `steps`."""
    kinds = {column.name: column.kind for column in have}
    return len(kinds) == len(steps) and all(_stays(step, kinds) for step in steps)


def added_only(have: Sequence[ExistingColumn], steps: Sequence[ShapeStep]) -> list[pa.Field] | None:
    """Return the columns to add if all others stay and older rows get NULL in them; otherwise None."""
    kinds = {column.name: column.kind for column in have}
    if not set(kinds) <= {step.source for step in steps}:
        return None
    added = [step for step in steps if step.source is None]
    plain = all(step.fill is None and not step.is_marked for step in added)
    stay = all(_stays(step, kinds) for step in steps if step.source is not None)
    return [step.field for step in added] if plain and stay else None


def _stays(step: ShapeStep, kinds: dict[str, pa.DataType]) -> bool:
    return (
        step.source == step.field.name
        and not step.lenient
        and step.coerced == SAME
        and step.source in kinds
        and same_type(kinds[step.source], step.field.type)
    )


def _filled(
    relation: Relation, column: Column, field: pa.Field, *, follow: bool, context: dict[str, str]
) -> ShapeStep:
    if column.missing is not None:
        value, is_exact = value_of(relation, column, column.missing)
        return ShapeStep(field, None, fill=value, text=None if is_exact else column.missing)
    if not column.unknown:
        return ShapeStep(field, None)
    if follow:
        return ShapeStep(field, None, unknown=True)
    raise TailraceError(
        Kind.SINK_SCHEMA_REFUSED,
        f"follow a change of schema: column {column.name!r} was added or altered with values that the "
        "database computed for each row and did not send, or it is unknown which column a value came from, "
        "because the table was altered several times while capture was behind",
        _choices(context),
        {**context, "column": column.name},
    )


def _followed(old: ExistingColumn, column: Column, kind: pa.DataType) -> Coercion | None:
    """Return the conversion, in addition to a cast to `kind`, from values of the old type to PostgreSQL's
    values after the change; None if it is not known.
    """
    new = known_type(column)
    if same_type(old.kind, kind):
        if old.type is not None:
            return coercion(old.type, new, kind)
        # A table of a version that did not store types: the column's stored oid and modifier must be equal.
        noted = old.type_oid, old.type_modifier
        known = not old.type_oid or noted == (column.type_oid, column.type_modifier)
        is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
        return SAME if known or is_number else None  # a domain over it, or no longer
    before = old.type.oid if old.type is not None else 0
    if pa.types.is_integer(old.kind) and before in {0, *_INTEGERS}:
        exact = new.oid in _INTEGERS or (
            new.oid == _NUMERIC and (new.modifier == -1 or pa.types.is_decimal(kind))
        )
        as_double = old.kind != pa.int64() and pa.types.is_float64(kind) and new.oid in _FLOATS
        return SAME if exact or as_double or new.oid in _TEXTS else None
    if pa.types.is_floating(old.kind) and before in {0, *_FLOATS}:
        return SAME if new.oid in _FLOATS else None
    if old.type is not None and pa.types.is_list(old.kind) and pa.types.is_list(kind):
        return (
            SAME if _is_wider(item_of(old.type), item_of(new), old.kind.value_type, kind.value_type) else None
        )
    if pa.types.is_decimal(old.kind) and pa.types.is_string(kind) and before == new.oid == _NUMERIC:
        shape = numeric_shape(new.modifier)  # a text has all digits after the point
        return SAME if shape is None or shape[1] == old.kind.scale else None
    if pa.types.is_decimal(old.kind) and before in {0, _NUMERIC}:
        held_so = pa.types.is_decimal(kind) or pa.types.is_integer(kind)
        return SAME if held_so and new.oid in {_NUMERIC, *_INTEGERS} else None  # rounded as PostgreSQL does
    return SAME if before in {0, _DATE} and pa.types.is_date(old.kind) and new.oid == _TIMESTAMP else None


def _is_wider(
    old: tuple[ValueType, str] | None,
    new: tuple[ValueType, str] | None,
    held: pa.DataType,
    kind: pa.DataType,
) -> bool:
    """Return whether arrays of `new` hold all items of arrays of `old`, and PostgreSQL writes them alike."""
    if old is None or new is None:
        return False
    if old[0].oid in _INTEGERS and new[0].oid in _INTEGERS:
        return bool(held.bit_width < kind.bit_width)
    are_decimals = pa.types.is_decimal(held) and pa.types.is_decimal(kind)
    are_numbers = are_decimals and old[0].oid == new[0].oid == _NUMERIC
    return are_numbers and held.scale == kind.scale and held.precision < kind.precision


def _choices(context: dict[str, str]) -> str:
    again = shlex.join(["tailrace", "snapshot", "FILE", "--table", context.get("table", "T")])
    return (
        "choose: set `on_type_change: follow` for the sink and start again, which converts the rows as far "
        f"as possible, then have its rows sent again: `{again}`; or begin with a new log, a new snapshot and "
        "an empty path; or leave the table out of the sink's `tables`"
    )


def _refuse_type(
    name: str,
    old: pa.DataType,
    new: pa.DataType,
    held: ExistingColumn,
    column: Column,
    context: dict[str, str],
) -> NoReturn:
    found = f"was {old} and is {new} now; the database rewrote the table's rows and did not send them"
    noted = held.type_oid, held.type_modifier
    if same_type(old, new) and noted == (column.type_oid, column.type_modifier):
        found = "has a type whose labels or attributes were changed, and older rows keep them as they were"
    elif same_type(old, new):
        found = f"was of type {held.type_oid} ({held.type_modifier}) and is of type {column.type_oid} "
        found += f"({column.type_modifier}) now; the database rewrote the table's rows and did not send them"
    raise TailraceError(
        Kind.SINK_SCHEMA_REFUSED,
        f"follow a change of schema: column {name!r} {found}",
        _choices(context),
        {**context, "column": name},
    )


def refuse_value(name: str, context: dict[str, str]) -> NoReturn:
    """Raise the error for rows of the target with values that a column's new type can't represent.

    :raises TailraceError: `SINK_SCHEMA_REFUSED`.
    """
    raise TailraceError(
        Kind.SINK_SCHEMA_REFUSED,
        f"follow a change of schema: column {name!r} has values that its new type can't hold unchanged; "
        "the database changed them and did not send them",
        _choices(context),
        {**context, "column": name},
    )
