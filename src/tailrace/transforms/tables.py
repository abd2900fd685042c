"""Transformations for tables: changes stay cells, so that a table's rows, keys and JSON are made of them.

A table's key is columns of its rows: what `apply_to` says makes no difference here. What has no meaning for a
table is refused before (`config.transformations.tables`).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.config.patterns import matches_any
from tailrace.config.transformations import predicates as choices
from tailrace.config.transformations.options import DropConfig
from tailrace.config.transformations.predicates import AnyPredicate
from tailrace.config.transformations.steps import ROOTS, TransformationConfig, python_regex
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
from tailrace.records.group import Group
from tailrace.transforms.chain import Chain, close_of
from tailrace.transforms.contract import Transformation
from tailrace.transforms.factory import build
from tailrace.transforms.fields import BOTH, failure, fitting
from tailrace.transforms.groups.columns import AddFields, Cast, DropFields, Mask, Rename
from tailrace.transforms.timestamps import Timestamps

#: Schema and table, after which a target names its folder.
Name = tuple[str, str]

#: What a computed column is made of, by its name: a mark of each column that it reads.
Inputs = dict[str, list[str]]

_Converting = Cast | Timestamps


@dataclass(frozen=True, slots=True)
class TableChain:
    """Transformations of one sink's tables. May be pickled; holds secrets, and shows none.

    :param keeps_keys: rows are told apart by their keys (a mirror): a step that would change them is refused.
    """

    chain: Chain = field(default=Chain(), repr=False)
    steps: tuple[TransformationConfig, ...] = ()
    predicates: Mapping[str, AnyPredicate] = field(default_factory=dict)
    keeps_keys: bool = False

    def apply(
        self, changes: TableChanges, origin: SourceInfo | None = None
    ) -> list[tuple[Name, TableChanges]]:
        """Return what becomes of changes, by the table that they go to; no part is empty.

        A function of the changes: the same ones give the same for ever, wherever it is computed.

        :raises TailraceError: as `Chain.apply`; `CONFIG_INVALID` if a key would be lost.
        """
        relation = changes.relation
        assert relation is not None, "logical messages belong to no table"
        own = relation.qualified_name
        if not self.steps:
            return [((relation.schema, relation.table), changes)] if changes.count else []
        group = Group.of_changes(own, np.arange(changes.count), changes, origin)
        found = []
        for made in self.chain.apply(group):
            assert made.wire is not None, "steps for tables leave cells"
            found.append((_target(made.topic, relation), made.wire))
        return found

    def of_table(self, relation: Relation) -> tuple[Relation, Inputs]:
        """Return a table as these steps leave it, and what its computed columns are made of.

        For steps that are the same for all rows of a table, as those of a mirror are.

        :raises TailraceError: as `apply`.
        """
        group = Group.of_changes(relation.qualified_name, np.arange(0), no_changes(relation))
        inputs: Inputs = {}
        for step, given in zip(self.chain.steps, self.steps, strict=True):
            if isinstance(given, DropConfig) or not self._concerns(given, relation):
                continue
            assert group.relation is not None
            inner = _inner(step.transformation)
            if isinstance(inner, ComputedStep):
                inputs |= inner.inputs(group.relation)
            (group,) = step.transformation.apply(group)
        assert group.relation is not None
        return group.relation, inputs

    def mark(self, relation: Relation) -> str:
        """Return a mark of the steps that concern a table; empty if none does. It tells no secret."""
        marks: list[Any] = []
        for step, given in zip(self.chain.steps, self.steps, strict=True):
            if not self._concerns(given, relation):
                continue
            what = given.model_dump(
                mode="json", exclude={"predicate", "negate", "salt", "type"}, exclude_defaults=True
            )
            salt = getattr(_inner(step.transformation), "salt", None)
            secret = hmac.digest(salt.value, b"salt", hashlib.sha256).hex() if salt is not None else ""
            marks.append([type(given).__name__, what, secret])
        if not marks:
            return ""
        return hashlib.sha256(json.dumps(marks, sort_keys=True).encode()).hexdigest()[:32]

    def _concerns(self, given: TransformationConfig, relation: Relation) -> bool:
        predicate = None if given.predicate is None else self.predicates[given.predicate]
        if isinstance(predicate, choices.TablePredicate):
            return matches_any(predicate.tables, relation.schema, relation.table) != given.negate
        if isinstance(predicate, choices.TopicPredicate):
            found = re.fullmatch(python_regex(predicate.pattern), relation.qualified_name)
            return (found is not None) != given.negate
        return True


def table_chain(
    steps: Sequence[TransformationConfig], predicates: Mapping[str, AnyPredicate], *, keeps_keys: bool = False
) -> TableChain:
    """Return the chain for a sink of tables.

    :raises TailraceError: as `factory.build`.
    """
    chain = build(steps, predicates)
    made = tuple(
        replace(step, transformation=_for_tables(step.transformation, keeps_keys=keeps_keys))
        for step in chain.steps
    )
    return TableChain(Chain(made), tuple(steps), dict(predicates), keeps_keys)


def _for_tables(given: Transformation, *, keeps_keys: bool) -> Transformation:
    found: Transformation = given
    if isinstance(given, Rename | Mask):
        found = replace(given, part=BOTH)
    elif isinstance(given, DropFields):
        found = DroppedColumns(given)
    elif isinstance(given, AddFields | Cast | Timestamps):
        found = ComputedStep(given, keeps_keys)
    return KeyKept(found) if keeps_keys else found


def _inner(transformation: Transformation) -> Transformation:
    return transformation.step if isinstance(transformation, KeyKept) else transformation


def _target(topic: str, relation: Relation) -> Name:
    if topic == relation.qualified_name:
        return relation.schema, relation.table
    schema, dot, table = topic.partition(".")
    return (schema, table) if dot and schema and table else (relation.schema, topic)


#: Tables stay as they are.
NO_STEPS = TableChain()


@dataclass(frozen=True, slots=True)
class DroppedColumns:
    """Leaves columns out of a table, those of its key too."""

    given: DropFields

    def apply(self, group: Group) -> list[Group]:
        """Return the changes without the columns."""
        relation, wire = _table_of(group)
        gone = self.gone([column.name for column in relation.columns])
        return [group.with_wire(wire.reshaped(reshaped(relation, gone, {})))] if gone else [group]

    def gone(self, names: Sequence[str]) -> set[str]:
        """Return those of the columns that are left out."""
        meant = set(fitting(self.given.patterns, names))
        return set(names) - meant if self.given.keeps else meant


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """Adds columns to a table, or gives columns another form, and writes the values as cells.

    :param of_rows: the table has one row a key, so a value that was not sent is the one that the row has.
    """

    given: AddFields | _Converting
    of_rows: bool = False

    def apply(self, group: Group) -> list[Group]:
        """Return the changes with the columns.

        :raises TailraceError: `TRANSFORM_FAILED` if an expression or a value does not fit, or a value that is
            needed was not sent.
        """
        relation, _ = _table_of(group)
        if isinstance(self.given, AddFields):
            found = self._added(group, self.given)
        else:
            found = self._converted(group, self.given, relation)
        return [_with_columns(group, found)] if found else [group]

    def inputs(self, relation: Relation) -> Inputs:
        """Return what the computed columns are made of."""
        known = {column.name: column for column in relation.columns}
        if not isinstance(self.given, AddFields):
            return {name: [_mark(name, known.get(name))] for name in self.given.meant(known)}
        return {
            name: sorted(_mark(read, known.get(read)) for read in _columns_read(expression.text))
            for name, expression in self.given.fields.items()
        }

    def _added(self, group: Group, given: AddFields) -> dict[str, tuple[pa.DataType, ComputedColumn]]:
        relation, _ = _table_of(group)
        names = [column.name for column in relation.columns]
        found = {}
        for name, values in given.added(group).items():
            place = names.index(name) if name in names else -1
            expression = given.fields.get(name)
            unsent = np.zeros(len(group), np.bool_)
            if expression is not None and name not in given.metadata:
                unsent = self._unsent(group, name, expression.text)
            texts = _texts(group, name, values)
            found[name] = values.type, ComputedColumn(place, texts, texts, unsent)
        return found

    def _unsent(self, group: Group, name: str, text: str) -> npt.NDArray[np.bool_]:
        """Return where the source did not send a column that an expression reads.

        :raises TailraceError: `TRANSFORM_FAILED` if the row that is there does not give the value either.
        """
        relation, wire = _table_of(group)
        kind = wire.tuples().current.kind
        # An expression that asks whether a value was sent says itself what it is without it.
        asked = {path[-1] for how, path, _ in inputs_of(text, ROOTS) if how == "was_sent"}
        read = _columns_read(text) - asked
        places = [at for at, column in enumerate(relation.columns) if column.name in read]
        missing = kind[places] == UNCHANGED
        unsent: npt.NDArray[np.bool_] = missing.any(axis=0)
        paths = {path for _, path, _ in inputs_of(text, ROOTS)}
        known = ~missing.all(axis=0) if len(paths) == len(places) else np.ones(len(group), np.bool_)
        if self.of_rows and (unsent & known).any():
            raise failure(
                group,
                f"compute the column {name!r}: an update did not send all that it is computed from, because "
                "large values that stay the same are not sent, and the other values may have changed",
                "ALTER TABLE … REPLICA IDENTITY FULL has the source send them; or compute the column where "
                "the mirror is read",
            )
        return unsent

    def _converted(
        self, group: Group, given: _Converting, relation: Relation
    ) -> dict[str, tuple[pa.DataType, ComputedColumn]]:
        _, wire = _table_of(group)
        found = {}
        for name in given.meant(column.name for column in relation.columns):
            place = next(at for at, column in enumerate(relation.columns) if column.name == name)
            made = []
            for image in ("after", "before"):
                values = wire.image_column(image, name)
                assert values is not None
                made.append(given.converted(group, image, name, values))
            new, old = made
            texts = _texts(group, name, new), _texts(group, name, old)
            # Of a delete, the row is the one before.
            current = pc.if_else(pa.array(wire.op == ord(Op.DELETE)), texts[1], texts[0])
            unsent = np.zeros(len(group), np.bool_)
            found[name] = new.type, ComputedColumn(place, current, texts[1], unsent, is_cast=True)
        return found


@dataclass(frozen=True, slots=True)
class KeyKept:
    """Does a step unless it would change what tells the rows of a table apart."""

    step: Transformation

    def apply(self, group: Group) -> Iterable[Group]:
        """As the step's.

        :raises TailraceError: `CONFIG_INVALID` if it drops, masks or computes a column of the key.
        """
        relation, _ = _table_of(group)
        names = [column.name for column in relation.columns]
        what, touched = self._changes(names)
        if lost := touched & set(relation.key):
            raise TailraceError(
                Kind.CONFIG_INVALID,
                f"transform a mirror's table: its key has {', '.join(map(repr, sorted(lost)))}, which "
                f"a transformation {what}, so that rows could not be told apart",
                "give it other columns or, by a predicate of tables, other tables; columns of a key may be "
                "renamed, hashed and cast to text; with mode: append any column may be changed",
                {"table": relation.qualified_name},
            )
        return self.step.apply(group)

    def close(self) -> None:
        """Close the step."""
        close_of(self.step)()

    def _changes(self, names: Sequence[str]) -> tuple[str, set[str]]:
        step: Any = self.step.given if isinstance(self.step, ComputedStep) else self.step
        if isinstance(step, DroppedColumns):
            return "drops", step.gone(names)
        if isinstance(step, Mask) and step.mask.method != "hash":
            return "masks", set(fitting(step.patterns, names))
        if isinstance(step, Cast):
            return "casts", {name for name in step.meant(names) if step.types[name] != "VARCHAR"}
        if isinstance(step, Timestamps):
            return "converts", set(step.meant(names))
        if isinstance(step, AddFields):
            return "replaces", {*step.static, *step.metadata, *step.fields}
        return "", set()


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


def _with_columns(group: Group, found: Mapping[str, tuple[pa.DataType, ComputedColumn]]) -> Group:
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
    """Return PostgreSQL's type, and its modifier, of values that are given as `arrow`."""
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
    """Return values as PostgreSQL would send them."""
    arrow = values.type
    if pa.types.is_boolean(arrow):
        return pc.if_else(values, "t", "f")
    try:
        return texts_of(values)
    except pa.ArrowNotImplementedError:
        raise failure(
            group,
            f"compute the column {name!r}: its values, {arrow}, have no text",
            "leave the column as it is, or compute texts or numbers from it",
        ) from None
