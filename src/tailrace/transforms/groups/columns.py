"""Transformations that rename, drop, mask, add and cast columns.

A transformation that changes a table's columns alike in rows and keys is applied to the cells, if
possible: the changes stay in the source's format, and nothing is decoded.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.config.source.column_policy import MaskOptions
from tailrace.config.transformations import options
from tailrace.config.transformations.steps import ROOTS
from tailrace.decode.column_policy import Salt, fixed_text, reshaped
from tailrace.decode.rows import specials
from tailrace.decode.types import as_text, cast_as_sent
from tailrace.decode.values.masks import HASH_LENGTH, hashed_texts
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
    with_converted,
    with_edited,
    with_notes,
    with_relation,
    with_values,
    without,
)
from tailrace.transforms.groups.rows import GroupRows, computed, metadata_column
from tailrace.transforms.groups.values import TEXT, cast, column_texts, struct_of


@dataclass(frozen=True, slots=True)
class Rename:
    """Renames columns."""

    given: options.RenameConfig

    def meant(self, names: Iterable[str]) -> list[str]:
        """Return those of the columns that are renamed."""
        return [name for name in names if name in self.given.fields]

    def apply(self, group: Group) -> list[Group]:
        """Return the records with the new names.

        :raises TailraceError: `TRANSFORM_FAILED` if two columns of a table would have the same name.
        """
        part, names = self.given.apply_to, self.given.fields
        known = field_names(group, part)
        if not self.meant(known):
            return [group]
        new = [names.get(name, name) for name in known]
        if twice := {name for name in new if new.count(name) > 1}:
            raise failure(
                group,
                f"rename columns: there would be two called {', '.join(sorted(map(repr, twice)))}",
                "choose another name, or rename or drop the other column too",
            )
        if group.wire is not None and group.relation is not None and part == BOTH:
            return [group.with_wire(group.wire.named(renamed(group.relation, names)))]

        def edit(found: Fields) -> Fields:
            return {names.get(name, name): values for name, values in found.items()}

        found = with_edited(group, part, edit, lambda name: names.get(name, name))
        return [with_relation(found, part, lambda relation: renamed(relation, names))]


def renamed(relation: Relation, names: Mapping[str, str]) -> Relation:
    """Return a table with other names of columns."""
    return replace(
        relation,
        columns=tuple(replace(c, name=names.get(c.name, c.name)) for c in relation.columns),
        primary_key=tuple(names.get(name, name) for name in relation.primary_key),
        chosen_key=tuple(names.get(name, name) for name in relation.chosen_key),
    )


@dataclass(frozen=True, slots=True)
class DropFields:
    """Drops the named columns, or all others."""

    given: options.DropFieldsConfig

    def meant(self, names: Collection[str]) -> list[str]:
        """Return those of the columns that are dropped."""
        if self.given.keep is None:
            return fitting(self.given.fields or (), names)
        kept = set(fitting(self.given.keep, names))
        return [name for name in names if name not in kept]

    def apply(self, group: Group) -> list[Group]:
        """Return the records without the columns."""
        part = self.given.apply_to
        return [without_columns(group, part, self.meant(field_names(group, part)))]


def without_columns(group: Group, part: str, names: Collection[str]) -> Group:
    """Return records without these columns in their rows or keys, or both."""
    if not names:
        return group
    relation, gone = group.relation, set(names)
    # A column that is dropped from the cells is dropped from the key, too.
    in_key = gone & set(relation.key) if relation is not None else set()
    if group.wire is not None and relation is not None and part != KEY and not in_key:
        return group.with_wire(group.wire.reshaped(reshaped(relation, gone, {})))

    def edit(found: Fields) -> Fields:
        return {name: values for name, values in found.items() if name not in gone}

    found = with_edited(group, part, edit, without(gone))
    return with_relation(found, part, lambda each: reshaped(each, gone, {}).relation)


@dataclass(frozen=True, slots=True)
class Mask:
    """Masks the values of columns; NULL stays NULL."""

    given: options.MaskConfig
    salt: Salt | None

    @classmethod
    def of(cls, given: options.MaskConfig) -> Mask:
        return cls(given, None if given.salt is None else Salt.of(given.salt))

    def meant(self, names: Iterable[str]) -> list[str]:
        """Return those of the columns that are masked."""
        return fitting(self.given.fields, names)

    def apply(self, group: Group) -> list[Group]:
        """Return the records with masked values.

        :raises TailraceError: `TRANSFORM_FAILED` if values can't be written as text, which is masked.
        """
        part = self.given.apply_to
        meant = self.meant(field_names(group, part))
        if not meant:
            return [group]
        relation, wire = group.relation, group.wire
        masks = dict.fromkeys(meant, (self.given, self.salt))
        if wire is not None and relation is not None and part == BOTH:
            return [group.with_wire(wire.reshaped(reshaped(relation, (), masks)))]
        found = with_converted(group, part, meant, partial(self._masked_if_sent, group))
        found = with_notes(found, part, special=without(meant))
        if self.given.method != "null":
            found = self._with_specials(group, found, meant)
        return [with_relation(found, part, lambda each: reshaped(each, (), masks).relation)]

    def _with_specials(self, group: Group, found: Group, meant: Collection[str]) -> Group:
        # Masks the texts in `special` for the column; `special` loses them, because they show the values.
        for place, (rows, texts) in specials(group.column("special")).items():
            image, _, name = place.partition(".")
            if image in images_of(group, self.given.apply_to) and name in meant:
                kind = pc.struct_field(found.column(image), name).type
                masked = self._masked(group, name, texts)
                if self.given.method == "fixed":
                    masked = pa.repeat(_constant(self.given, kind)[0], len(texts))
                found = with_values(found, image, name, rows, masked)
        return found

    def _masked_if_sent(self, group: Group, _image: str, name: str, values: pa.Array) -> pa.Array:
        masked = self._masked(group, name, values)
        if group.is_change or group.relation is None or not pa.types.is_string(values.type):
            return masked
        # Only the placeholder by which `flatten` replaced a value that was not sent stays unmasked.
        unsent = pc.invert(GroupRows(group, "null").was_sent(("value", name)))
        is_placeholder = pc.equal(values, group.relation.modes.unavailable_placeholder)
        return pc.if_else(pc.and_(unsent, is_placeholder), values, masked)

    def _masked(self, group: Group, name: str, values: pa.Array) -> pa.Array:
        method = self.given.method
        if method == "null":
            return pa.nulls(len(values), values.type)
        if method == "fixed":
            return pc.if_else(pc.is_valid(values), *_constant(self.given, values.type))
        try:
            texts = cast(values, TEXT)
        except ExpressionError:
            raise failure(
                group,
                f"mask the column {name!r}: the type {values.type} can't be written as text",
                "use the method fixed or null, or drop the column",
            ) from None
        if method == "truncate":
            return pc.utf8_slice_codeunits(texts, start=0, stop=self.given.length)
        assert self.salt is not None
        return _hashed(texts, self.salt.value)


def _constant(mask: MaskOptions, arrow: pa.DataType) -> tuple[pa.Scalar, pa.Scalar]:
    number = None if isinstance(mask.value, str | None) else _number(mask.value, arrow)
    found = pa.scalar(fixed_text(mask)) if number is None else number
    return found, pa.scalar(None, found.type)


def _number(value: float, arrow: pa.DataType) -> pa.Scalar | None:
    """Return a number in an Arrow type; None if that is not a numeric type or can't hold it."""
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
    """Adds columns: constants, metadata of the change, and values of expressions."""

    given: options.AddFieldsConfig
    expressions: Mapping[str, Expression]

    @classmethod
    def of(cls, given: options.AddFieldsConfig) -> AddFields:
        return cls(given, {name: Expression(text, ROOTS) for name, text in given.computed.items()})

    def meant(self, names: Iterable[str]) -> list[str]:
        """Return those of the columns that are replaced."""
        added = {*self.given.static, *self.given.metadata, *self.given.computed}
        return [name for name in names if name in added]

    def apply(self, group: Group) -> list[Group]:
        """Return the records with the columns; one of the same name is replaced.

        :raises TailraceError: `TRANSFORM_FAILED` if an expression does not fit the records.
        """
        return [with_added(group, self.given.apply_to, self.added(group))]

    def added(self, group: Group) -> dict[str, pa.Array]:
        """Return the columns by name.

        :raises TailraceError: as `apply`.
        """
        given = self.given
        added = {name: _repeated(value, len(group)) for name, value in given.static.items()}
        added |= computed(group, self.expressions, given.missing, "add the column")
        return added | {name: metadata_column(group, what) for name, what in given.metadata.items()}


def with_added(group: Group, part: str, added: Mapping[str, pa.Array]) -> Group:
    """Return records with columns in their rows or keys, or both; one of the same name is replaced."""

    def edit(found: Fields) -> Fields:
        return {**found, **added}

    if part != ROW and pa.types.is_null(group.column("key").type):
        # A record without a key gets one with the added columns.
        group = group.with_column("key", struct_of(added, None, len(group)))
    found = with_edited(group, part, edit, without(added))
    if part != KEY:  # their values may be null, and of any type
        found = with_relation(found, ROW, lambda relation: reshaped(relation, set(added), {}).relation)
    texts = [name for name, values in added.items() if pa.types.is_string(values.type)]
    return found if part == ROW else _with_texts(found, texts, KEY)


def _with_texts(group: Group, names: Iterable[str], part: str) -> Group:
    """Return records whose table has text columns of these names, without the forms of their former types."""
    return with_relation(group, part, lambda relation: as_text(relation, set(names)))


def _repeated(value: object, count: int) -> pa.Array:
    return pa.nulls(count) if value is None else pa.repeat(pa.scalar(value), count)


@dataclass(frozen=True, slots=True)
class Cast:
    """Casts columns to other types."""

    given: options.CastConfig
    types: Mapping[str, str]

    @classmethod
    def of(cls, given: options.CastConfig) -> Cast:
        return cls(given, {name: require_type(text) for name, text in given.fields.items()})

    def meant(self, names: Iterable[str]) -> list[str]:
        """Return those of the columns that are cast."""
        return [name for name in names if name in self.types]

    def apply(self, group: Group) -> list[Group]:
        """Return the records with the columns cast.

        :raises TailraceError: `TRANSFORM_FAILED` if a value does not fit the new type.
        """
        part = self.given.apply_to
        meant = self.meant(field_names(group, part))
        relation, wire = group.relation, group.wire
        if wire is not None and relation is not None and part == BOTH:
            texts = cast_as_sent(relation).intersection(self._texts(meant))
            if texts:
                group = group.with_wire(wire.named(as_text(relation, texts)))
                meant = [name for name in meant if name not in texts]
        if not meant:
            return [group]
        found = with_converted(group, part, meant, partial(self.converted, group))
        noted = set(self._texts(meant))  # a text column can hold every value
        return [_with_texts(with_notes(found, part, special=without(noted)), noted, part)]

    def _texts(self, names: Iterable[str]) -> list[str]:
        return [name for name in self.meant(names) if self.types[name] == TEXT]

    def converted(self, group: Group, image: str, name: str, values: pa.Array) -> pa.Array:
        """Return the values of a field of `key`, `before`, `after` or `value`, cast.

        :raises TailraceError: as `apply`.
        """
        to = self.types[name]
        try:
            return column_texts(group, image, name, values) if to == TEXT else cast(values, to)
        except pa.ArrowNotImplementedError:
            raise failure(
                group,
                f"cast the column {name!r} to text: the type {values.type} can't be written as text",
                "do not cast the column, or restrict the transformation by a predicate",
            ) from None
        except ExpressionError as error:
            raise failure(
                group,
                f"cast the column {name!r} from {values.type} to {to.lower()}: {error.message}",
                "choose a wider type, or restrict the transformation by a predicate",
            ) from None
