"""Columns renamed and left out, masked, added and cast.

What is done to a table's columns alike in rows and keys is done to the wire's cells where it can
be: such a change is still the source's bytes, and nothing is decoded.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.config.source.column_policy import ColumnMask
from tailrace.config.transformations import options
from tailrace.config.transformations.steps import ROOTS
from tailrace.decode.column_policy import Salt, fixed_text, reshaped
from tailrace.decode.rows import specials
from tailrace.decode.types import as_text, cast_as_sent
from tailrace.decode.values.masks import HASH_LENGTH, hashed_texts
from tailrace.errors import Kind, TailraceError
from tailrace.expressions.computing import Expression
from tailrace.expressions.language import ExpressionError, require_type
from tailrace.model import Relation
from tailrace.records.group import Group
from tailrace.transforms.fields import (
    BOTH,
    KEY,
    ROW,
    Fields,
    failure,
    field_names,
    fitting,
    images_of,
    with_edited,
    with_notes,
    with_relation,
    with_values,
)
from tailrace.transforms.groups.rows import GroupRows, fitting_expression, metadata_column
from tailrace.transforms.groups.texts import column_texts
from tailrace.transforms.groups.values import TEXT, cast, edited, struct_of


@dataclass(frozen=True, slots=True)
class Rename:
    """Gives columns other names."""

    names: Mapping[str, str]
    part: str = BOTH

    @classmethod
    def of(cls, given: options.RenameConfig) -> Rename:
        return cls(given.fields, given.apply_to)

    def apply(self, group: Group) -> list[Group]:
        """Return the records under the new names.

        :raises TailraceError: `TRANSFORM_FAILED` if a table would have a name twice.
        """
        known = field_names(group, self.part)
        if not set(known) & set(self.names):
            return [group]
        new = [self.names.get(name, name) for name in known]
        if twice := {name for name in new if new.count(name) > 1}:
            raise failure(
                group,
                f"rename columns: there would be two called {', '.join(sorted(map(repr, twice)))}",
                "choose another name, or rename or drop the other column too",
            )
        relation = _renamed(group.relation, self.names) if self.part != KEY else group.relation
        if group.wire is not None and relation is not None and self.part == BOTH:
            return [group.with_wire(group.wire.named(relation))]

        def edit(found: Fields) -> Fields:
            return {self.names.get(name, name): values for name, values in found.items()}

        found = with_edited(group, self.part, edit, lambda name: self.names.get(name, name))
        return [with_relation(found, relation)]


def _renamed(relation: Relation | None, names: Mapping[str, str]) -> Relation | None:
    if relation is None:
        return None
    return replace(
        relation,
        columns=tuple(replace(c, name=names.get(c.name, c.name)) for c in relation.columns),
        primary_key=tuple(names.get(name, name) for name in relation.primary_key),
        chosen_key=tuple(names.get(name, name) for name in relation.chosen_key),
    )


@dataclass(frozen=True, slots=True)
class DropFields:
    """Leaves columns out, or all but some."""

    patterns: tuple[str, ...]
    keeps: bool
    part: str = ROW

    @classmethod
    def of(cls, given: options.DropFieldsConfig) -> DropFields:
        return cls(given.fields or given.keep or (), given.fields is None, given.apply_to)

    def apply(self, group: Group) -> list[Group]:
        """Return the records without the columns."""
        known = field_names(group, self.part)
        meant = set(fitting(self.patterns, known))
        gone = set(known) - meant if self.keeps else meant
        if not gone:
            return [group]
        relation = group.relation
        # On the wire a column is left out of the key too.
        in_key = gone & set(relation.key) if relation is not None else set()
        if group.wire is not None and relation is not None and self.part != KEY and not in_key:
            return [group.with_wire(group.wire.reshaped(reshaped(relation, gone, {})))]

        def edit(found: Fields) -> Fields:
            return {name: values for name, values in found.items() if name not in gone}

        found = with_edited(group, self.part, edit, lambda name: None if name in gone else name)
        if relation is None or self.part == KEY:
            return [found]
        return [with_relation(found, reshaped(relation, gone, {}).relation)]


@dataclass(frozen=True, slots=True)
class Mask:
    """Puts something else in the place of columns' values; NULL stays NULL."""

    patterns: tuple[str, ...]
    mask: ColumnMask
    part: str = BOTH
    salt: Salt | None = None

    @classmethod
    def of(cls, given: options.MaskConfig) -> Mask:
        salt = None
        if given.salt is not None:
            value = given.salt.resolve()
            if not value:
                raise TailraceError(
                    Kind.CONFIG_INVALID,
                    f"resolve the salt {given.salt} of a mask: it is empty",
                    "give it 16 random characters or more",
                )
            salt = Salt(value.encode())
        return cls(given.fields, given.mask, given.apply_to, salt)

    def apply(self, group: Group) -> list[Group]:
        """Return the records with masked values.

        :raises TailraceError: `TRANSFORM_FAILED` if values have no text that could be masked.
        """
        meant = fitting(self.patterns, field_names(group, self.part))
        if not meant:
            return [group]
        relation, wire = group.relation, group.wire
        shape = None
        if relation is not None:
            shape = reshaped(relation, (), dict.fromkeys(meant, (self.mask, self.salt)))
        if wire is not None and shape is not None and self.part == BOTH:
            return [group.with_wire(wire.reshaped(shape))]

        def edit(found: Fields) -> Fields:
            return {n: self._masked_if_sent(group, n, v) if n in meant else v for n, v in found.items()}

        found = with_edited(group, self.part, edit, special=lambda name: None if name in meant else name)
        if self.mask.method != "null":
            found = self._with_specials(group, found, meant)
        return [found if shape is None or self.part == KEY else with_relation(found, shape.relation)]

    def _with_specials(self, group: Group, found: Group, meant: Collection[str]) -> Group:
        # A value that its column does not hold is masked as its text is, which goes: it would show it.
        for place, (rows, texts) in specials(group.column("special")).items():
            image, _, name = place.partition(".")
            if image in images_of(group, self.part) and name in meant:
                kind = pc.struct_field(found.column(image), name).type
                masked = self._masked(group, name, texts)
                if self.mask.method == "fixed":
                    masked = pa.repeat(_constant(self.mask, kind)[0], len(texts))
                found = with_values(found, image, name, rows, masked)
        return found

    def _masked_if_sent(self, group: Group, name: str, values: pa.Array) -> pa.Array:
        masked = self._masked(group, name, values)
        if group.is_change or group.relation is None or not pa.types.is_string(values.type):
            return masked
        # What `flatten` put in the place of a value that was not sent stays, and nothing else does.
        unsent = pc.invert(GroupRows(group, "null").was_sent(("value", name)))
        is_placeholder = pc.equal(values, group.relation.modes.unavailable_placeholder)
        return pc.if_else(pc.and_(unsent, is_placeholder), values, masked)

    def _masked(self, group: Group, name: str, values: pa.Array) -> pa.Array:
        method = self.mask.method
        if method == "null":
            return pa.nulls(len(values), values.type)
        if method == "fixed":
            return pc.if_else(pc.is_valid(values), *_constant(self.mask, values.type))
        try:
            texts = cast(values, TEXT)
        except ExpressionError:
            raise failure(
                group,
                f"mask the column {name!r}: its values, {values.type}, have no text",
                "mask it by the method fixed or null, or drop it",
            ) from None
        if method == "truncate":
            return pc.utf8_slice_codeunits(texts, start=0, stop=self.mask.length)
        assert self.salt is not None
        return _hashed(texts, self.salt.value)


def _constant(mask: ColumnMask, arrow: pa.DataType) -> tuple[pa.Scalar, pa.Scalar]:
    number = None if isinstance(mask.value, str | None) else _number(mask.value, arrow)
    found = pa.scalar(fixed_text(mask)) if number is None else number
    return found, pa.scalar(None, found.type)


def _number(value: float, arrow: pa.DataType) -> pa.Scalar | None:
    """Return a number in a type; None if that is none of numbers, or does not hold it."""
    try:
        if pa.types.is_integer(arrow) and value == int(value):
            return pa.scalar(int(value), arrow)
        if pa.types.is_decimal(arrow):
            return pa.scalar(Decimal(str(value)), arrow)
        found = pa.scalar(float(value), arrow) if pa.types.is_floating(arrow) else None
    except (pa.ArrowInvalid, OverflowError):
        return None
    return found if found is None or math.isfinite(found.as_py()) else None


def _hashed(texts: pa.StringArray, salt: bytes) -> pa.StringArray:
    coded = texts.dictionary_encode()
    digits = hashed_texts(coded.dictionary, salt).tobytes().decode()
    hashes = [digits[at : at + HASH_LENGTH] for at in range(0, len(digits), HASH_LENGTH)]
    return pa.array(hashes, pa.string()).take(coded.indices)


@dataclass(frozen=True, slots=True)
class AddFields:
    """Adds columns: constants, what is known of the change, and what expressions say."""

    fields: Mapping[str, Expression]
    metadata: Mapping[str, str]
    part: str = ROW
    missing: str = "error"
    static: Mapping[str, pa.Scalar] = field(default_factory=dict)

    @classmethod
    def of(cls, given: options.AddFieldsConfig) -> AddFields:
        fields = {name: Expression(text, ROOTS) for name, text in given.computed.items()}
        static = {name: pa.scalar(value) for name, value in given.static.items()}
        return cls(fields, given.metadata, given.apply_to, given.missing, static)

    def apply(self, group: Group) -> list[Group]:
        """Return the records with the columns; one of the same name is replaced.

        :raises TailraceError: `TRANSFORM_FAILED` if an expression does not fit.
        """
        return [with_added(group, self.part, self.added(group))]

    def added(self, group: Group) -> dict[str, pa.Array]:
        """Return the columns by name.

        :raises TailraceError: as `apply`.
        """
        rows = GroupRows(group, self.missing)
        added = {name: _repeated(value, len(group)) for name, value in self.static.items()}
        added |= {name: _value(group, name, found, rows) for name, found in self.fields.items()}
        return added | {name: metadata_column(group, what) for name, what in self.metadata.items()}


def with_added(group: Group, part: str, added: Mapping[str, pa.Array]) -> Group:
    """Return records with columns in their rows or keys, or both; one of the same name is replaced."""

    def edit(found: Fields) -> Fields:
        return {**found, **added}

    if part != ROW and pa.types.is_null(group.column("key").type):
        # A record without a key gets one of what is added.
        group = group.with_column("key", struct_of(added, None, len(group)))
    found = with_edited(group, part, edit, lambda name: None if name in added else name)
    texts = [name for name, values in added.items() if pa.types.is_string(values.type)]
    return _with_texts(found, texts, part)


def _with_texts(group: Group, names: Iterable[str], part: str) -> Group:
    """Return records whose table has texts under these names: no form of another type is theirs any more."""
    if group.relation is None or part == KEY:
        return group
    kept = set(group.relation.key) if part == ROW else set()
    return with_relation(group, as_text(group.relation, set(names) - kept))


def _value(group: Group, name: str, expression: Expression, rows: GroupRows) -> pa.Array:
    with fitting_expression(group, f"add the column {name!r}"):
        return expression.values(rows)


def _repeated(value: pa.Scalar, count: int) -> pa.Array:
    return pa.repeat(value, count) if value.is_valid else pa.nulls(count)


@dataclass(frozen=True, slots=True)
class Cast:
    """Gives columns another type."""

    types: Mapping[str, str] = field(default_factory=dict)
    part: str = BOTH

    @classmethod
    def of(cls, given: options.CastConfig) -> Cast:
        return cls({name: require_type(text) for name, text in given.fields.items()}, given.apply_to)

    def apply(self, group: Group) -> list[Group]:
        """Return the records with the columns cast.

        :raises TailraceError: `TRANSFORM_FAILED` if a value does not fit.
        """
        meant = self.meant(field_names(group, self.part))
        relation, wire = group.relation, group.wire
        if wire is not None and relation is not None and self.part == BOTH:
            texts = cast_as_sent(relation).intersection(self._texts(meant))
            if texts:
                group = group.with_wire(wire.named(as_text(relation, texts)))
                meant = [name for name in meant if name not in texts]
        if not meant:
            return [group]
        found = group
        for image in images_of(group, self.part):
            values = edited(group.column(image), partial(self._cast, group, image, set(meant)))
            found = found.with_column(image, values)
        noted = set(self._texts(meant))  # texts hold every value
        found = with_notes(found, self.part, special=lambda name: None if name in noted else name)
        return [_with_texts(found, noted, self.part)]

    def _cast(self, group: Group, image: str, meant: Collection[str], found: Fields) -> Fields:
        return {n: self.converted(group, image, n, v) if n in meant else v for n, v in found.items()}

    def _texts(self, names: Iterable[str]) -> list[str]:
        return [name for name in self.meant(names) if self.types[name] == TEXT]

    def meant(self, names: Iterable[str]) -> list[str]:
        """Return those of the columns that are cast."""
        return [name for name in names if name in self.types]

    def converted(self, group: Group, image: str, name: str, values: pa.Array) -> pa.Array:
        """Return values of a field of `key`, `before`, `after` or `value` as they are to be.

        :raises TailraceError: as `apply`.
        """
        to = self.types[name]
        try:
            return column_texts(group, image, name, values) if to == TEXT else cast(values, to)
        except pa.ArrowNotImplementedError:
            raise failure(
                group,
                f"cast the column {name!r} to text: {values.type} has none",
                "leave it as it is, or give it only the records that it is for, by a predicate",
            ) from None
        except ExpressionError as error:
            raise failure(
                group,
                f"cast the column {name!r} from {values.type} to {to.lower()}: {error.message}",
                "choose a wider type, or give it only the records that it is for, by a predicate",
            ) from None
