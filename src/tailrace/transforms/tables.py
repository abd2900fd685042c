"""Transformations of tables: they change the cells of changes, from which rows, keys and JSON are made later.

A table's key consists of columns of its rows, so `apply_to` has no effect here. Transformations that have no
meaning for a table are refused when the configuration is read (`config.transformations.tables`).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.config.patterns import matches_any
from tailrace.config.transformations.predicates import AnyPredicate
from tailrace.config.transformations.steps import ROOTS, OfKeyAndRow, TransformationConfig
from tailrace.decode.changes import TableChanges, no_changes
from tailrace.decode.column_policy import reshaped
from tailrace.decode.computed import ComputedColumn, ComputedColumns
from tailrace.decode.json.debezium import SourceInfo
from tailrace.decode.kernel import UNCHANGED
from tailrace.decode.postgres_types import OIDS
from tailrace.decode.values.texts import texts_of
from tailrace.errors import Kind, TailraceError
from tailrace.expressions.sql import inputs_of
from tailrace.model import Column, Op, Relation, ReplicaIdentity
from tailrace.records.group import Flags, Group
from tailrace.transforms.chain import Chain, Step
from tailrace.transforms.contract import Transformation
from tailrace.transforms.factory import build
from tailrace.transforms.fields import BOTH, failure
from tailrace.transforms.groups.columns import AddFields, Cast, DropFields, Mask
from tailrace.transforms.groups.values import TEXT
from tailrace.transforms.selection import Drop, Tables, TopicChoice
from tailrace.transforms.timestamps import Timestamps

#: Schema and table, from which a target derives the name of its folder.
Name = tuple[str, str]

#: For each computed column, by name: a mark of each column that it is computed from.
Inputs = dict[str, list[str]]

#: Computed columns by name, with the type of their values.
Computed = dict[str, tuple[pa.DataType, ComputedColumn]]


@dataclass(frozen=True, slots=True)
class TableChain:
    """The transformations of one sink's tables. Can be pickled; holds secrets, but does not show them.

    :param keeps_keys: whether keys identify rows (a mirror), so that a step that changes them is refused.
    """

    chain: Chain = field(default=Chain(), repr=False)
    keeps_keys: bool = False

    def apply(
        self, changes: TableChanges, origin: SourceInfo | None = None
    ) -> list[tuple[Name, TableChanges]]:
        """Return the transformed changes, by the table that they are written to; no part is empty.

        Deterministic: the same changes always give the same result, in any process.

        :raises TailraceError: as `Chain.apply`; `CONFIG_INVALID` if a key would be lost.
        """
        relation = changes.relation
        assert relation is not None, "logical messages belong to no table"
        own = relation.qualified_name
        if not self.chain:
            return [((relation.schema, relation.table), changes)] if changes.count else []
        group = Group.of_changes(own, np.arange(changes.count), changes, origin)
        found = []
        for made in self.chain.apply(group):
            assert made.wire is not None, "steps for tables leave cells"
            found.append((_target(made.topic, relation), made.wire))
        return found

    def of_table(self, relation: Relation) -> tuple[Relation, Inputs]:
        """Return a table as it is after these steps, and the inputs of its computed columns.

        For steps that apply to all rows of a table alike, as those of a mirror do.

        :raises TailraceError: as `apply`.
        """
        group = Group.of_changes(relation.qualified_name, np.arange(0), no_changes(relation))
        inputs: Inputs = {}
        for step in self._concerning(relation):
            if not isinstance(step.step, Drop):
                inputs |= step.inputs(_table_of(group)[0])
                (group,) = step.apply(group)
        return _table_of(group)[0], inputs

    def mark(self, relation: Relation) -> str:
        """Return a hash of the steps that apply to a table; empty if none does. It reveals no secret."""
        marks = [step.mark() for step in self._concerning(relation)]
        if not marks:
            return ""
        return hashlib.sha256(json.dumps(marks, sort_keys=True).encode()).hexdigest()[:32]

    def _concerning(self, relation: Relation) -> Iterator[TableStep]:
        for step in self.chain.steps:
            assert isinstance(step.transformation, TableStep)
            if _concerns(step, relation):
                yield step.transformation


def _concerns(step: Step, relation: Relation) -> bool:
    chooses = step.predicate
    if isinstance(chooses, Tables):
        return matches_any(chooses.patterns, relation.schema, relation.table) != step.negate
    if isinstance(chooses, TopicChoice):
        return (re.fullmatch(chooses.pattern, relation.qualified_name) is not None) != step.negate
    return True


def table_chain(
    steps: Sequence[TransformationConfig], predicates: Mapping[str, AnyPredicate], *, keeps_keys: bool = False
) -> TableChain:
    """Return the chain for a sink of tables.

    :raises TailraceError: as `factory.build`.
    """
    built = build([_of_both(step) for step in steps], predicates)
    made = (
        replace(step, transformation=TableStep(given, step.transformation, keeps_keys))
        for given, step in zip(steps, built.steps, strict=True)
    )
    return TableChain(Chain(tuple(made)), keeps_keys)


def _of_both(step: TransformationConfig) -> TransformationConfig:
    # Steps that apply to the row and the key alike change cells.
    return step.model_copy(update={"apply_to": BOTH}) if isinstance(step, OfKeyAndRow) else step


def _target(topic: str, relation: Relation) -> Name:
    if topic == relation.qualified_name:
        return relation.schema, relation.table
    schema, dot, table = topic.partition(".")
    return (schema, table) if dot and schema and table else (relation.schema, topic)


#: A chain that leaves tables unchanged.
NO_STEPS = TableChain()


@dataclass(frozen=True, slots=True)
class TableStep:
    """A step that is applied to the cells of a table's changes.

    :param given: the step's options, as in the configuration.
    :param keeps_keys: whether keys identify rows (a mirror): then a step that changes keys is refused, and a
        value that was not sent stays the one that the row has.
    """

    given: TransformationConfig
    step: Transformation
    keeps_keys: bool

    def apply(self, group: Group) -> Iterable[Group]:
        """Return the transformed changes.

        :raises TailraceError: as the step; `TRANSFORM_FAILED` if a value that is needed was not sent;
            `CONFIG_INVALID` if the step drops, masks or computes a column of the key.
        """
        relation, wire = _table_of(group)
        if self.keeps_keys:
            _require_kept(self.step, relation)
        step = self.step
        if isinstance(step, DropFields):
            # A column that is dropped from the row is dropped from the key, too.
            gone = step.meant([column.name for column in relation.columns])
            return [group.with_wire(wire.reshaped(reshaped(relation, gone, {})))] if gone else [group]
        if isinstance(step, AddFields):
            return [_with_columns(group, self._added(group, step))]
        if isinstance(step, Cast | Timestamps):
            return [_with_columns(group, _converted(group, step))]
        return step.apply(group)

    def mark(self) -> list[Any]:
        """Return JSON values that identify the step and its options. They reveal no secret."""
        what = self.given.model_dump(
            mode="json", exclude={"predicate", "negate", "salt", "type"}, exclude_defaults=True
        )
        salt = self.step.salt if isinstance(self.step, Mask) else None
        secret = hmac.digest(salt.value, b"salt", hashlib.sha256).hex() if salt is not None else ""
        return [type(self.given).__name__, what, secret]

    def inputs(self, relation: Relation) -> Inputs:
        """Return the inputs of the columns that the step computes."""
        known = {column.name: column for column in relation.columns}
        if isinstance(self.step, Cast | Timestamps):
            return {name: [_mark(name, known.get(name))] for name in self.step.meant(known)}
        expressions = self.step.expressions if isinstance(self.step, AddFields) else {}
        return {
            name: sorted(_mark(read, known.get(read)) for read in _columns_read(expression.text))
            for name, expression in expressions.items()
        }

    def _added(self, group: Group, step: AddFields) -> Computed:
        relation, _ = _table_of(group)
        names = [column.name for column in relation.columns]
        found = {}
        for name, values in step.added(group).items():
            place = names.index(name) if name in names else -1
            unsent = np.zeros(len(group), np.bool_)
            if name in step.expressions:
                unsent = self._unsent(group, name, step.expressions[name].text)
            texts = _texts(group, name, values)
            found[name] = values.type, ComputedColumn(place, texts, texts, unsent)
        return found

    def _unsent(self, group: Group, name: str, text: str) -> Flags:
        """Return in which rows the source did not send a column that an expression reads.

        :raises TailraceError: `TRANSFORM_FAILED` for a mirror, unless none of the inputs was sent.
        """
        relation, wire = _table_of(group)
        kind = wire.tuples().current.kind
        # An expression that calls `was_sent` for a column handles the missing value itself.
        asked = {path[-1] for how, path, _ in inputs_of(text, ROOTS) if how == "was_sent"}
        read = _columns_read(text) - asked
        places = [at for at, column in enumerate(relation.columns) if column.name in read]
        missing = kind[places] == UNCHANGED
        unsent: Flags = missing.any(axis=0)
        paths = {path for _, path, _ in inputs_of(text, ROOTS)}
        known = ~missing.all(axis=0) if len(paths) == len(places) else np.ones(len(group), np.bool_)
        if self.keeps_keys and (unsent & known).any():
            raise failure(
                group,
                f"compute the column {name!r}: an update did not send all that it is computed from, because "
                "large values that stay the same are not sent, and the other values may have changed",
                "run ALTER TABLE … REPLICA IDENTITY FULL, so that the source sends them; or compute the "
                "column in queries of the mirror",
            )
        return unsent


def _converted(group: Group, step: Cast | Timestamps) -> Computed:
    relation, wire = _table_of(group)
    names = [column.name for column in relation.columns]
    found = {}
    for name in step.meant(names):
        made = []
        for image in ("after", "before"):
            values = wire.image_column(image, name)
            assert values is not None
            made.append(step.converted(group, image, name, values))
        new, old = made
        texts = _texts(group, name, new), _texts(group, name, old)
        # The row of a delete is the row before.
        current = pc.if_else(pa.array(wire.op == ord(Op.DELETE)), texts[1], texts[0])
        unsent = np.zeros(len(group), np.bool_)
        column = ComputedColumn(names.index(name), current, texts[1], unsent, is_cast=True)
        found[name] = new.type, column
    return found


#: Verbs for what a step does to its columns, for messages.
_DOING = {DropFields: "drops", Mask: "masks", Cast: "casts", Timestamps: "converts", AddFields: "replaces"}


def _require_kept(step: Any, relation: Relation) -> None:
    """:raises TailraceError: `CONFIG_INVALID` if a step would change a column of the table's key."""
    what = _DOING.get(type(step))
    if what is None or (isinstance(step, Mask) and step.given.method == "hash"):
        return
    lost = step.meant(relation.key)
    if isinstance(step, Cast):
        lost = [name for name in lost if step.types[name] != TEXT]
    if lost:
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"transform a mirror's table: its key has {', '.join(map(repr, sorted(lost)))}, which "
            f"a transformation {what}, so that the key would no longer identify rows",
            "exclude these columns or, by a predicate of tables, this table; columns of a key can be "
            "renamed, hashed and cast to text; with mode: append any column can be changed",
            {"table": relation.qualified_name},
        )


def _table_of(group: Group) -> tuple[Relation, TableChanges]:
    assert group.relation is not None, "logical messages belong to no table"
    assert group.wire is not None, "steps for tables leave cells"
    return group.relation, group.wire


def _columns_read(text: str) -> set[str]:
    return {path[1] for _, path, _ in inputs_of(text, ROOTS) if len(path) > 1 and path[0] in ("after", "key")}


def _mark(name: str, column: Column | None) -> str:
    if column is None:
        return f"{name} -"
    return f"{column.number or name} {column.type_oid} {column.type_modifier}"


def _with_columns(group: Group, found: Computed) -> Group:
    if not found:
        return group
    relation, wire = _table_of(group)
    columns = list(relation.columns)
    for name, (arrow, computed) in found.items():
        oid, modifier = _type_of(arrow)
        if computed.place >= 0:
            former = columns[computed.place]
            columns[computed.place] = Column(
                name, oid, modifier, former.in_identity, former.number, not_null=False
            )
        else:
            columns.append(Column(name, oid, modifier, relation.identity is ReplicaIdentity.FULL))
    shape = replace(relation, columns=tuple(columns))
    return group.with_wire(
        wire.with_columns(ComputedColumns(shape, tuple(computed for _, computed in found.values())))
    )


def _type_of(arrow: pa.DataType) -> tuple[int, int]:
    """Return the OID and the modifier of PostgreSQL's type for values of the type `arrow`."""
    if pa.types.is_decimal(arrow) and arrow.precision <= 38 and 0 <= arrow.scale <= arrow.precision:
        return OIDS["numeric"], ((arrow.precision << 16) | arrow.scale) + 4
    if pa.types.is_decimal(arrow):
        return OIDS["numeric"], -1
    if pa.types.is_timestamp(arrow):
        return OIDS["timestamp" if arrow.tz is None else "timestamptz"], -1
    if pa.types.is_time(arrow):
        return OIDS["time"], -1
    return OIDS[_TYPES.get(arrow, "text")], -1


_TYPES = {
    pa.bool_(): "bool",
    pa.int16(): "int2",
    pa.int32(): "int4",
    pa.int64(): "int8",
    pa.float32(): "float4",
    pa.float64(): "float8",
    pa.date32(): "date",
}


def _texts(group: Group, name: str, values: pa.Array) -> pa.StringArray:
    """Return values as the texts that PostgreSQL would send."""
    arrow = values.type
    if pa.types.is_boolean(arrow):
        return pc.if_else(values, "t", "f")
    try:
        return texts_of(values)
    except pa.ArrowNotImplementedError:
        raise failure(
            group,
            f"compute the column {name!r}: values of the type {arrow} can't be written as text",
            "do not convert the column, or compute texts or numbers from it",
        ) from None
