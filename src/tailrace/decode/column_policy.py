"""A table as consumers of the log see it: without some columns, with others masked, with its key.

`TablePolicy` is the configuration's `ColumnPolicy` with its secrets resolved. It is sent to executors
inside tasks, and shows no secret: neither its repr nor any error contains one. It computes a table's
`Shape` from the policy and the relation alone.

Masks are applied to cells, before anything else reads them: rows of every form, keys and old rows
contain masked values only.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction

import numpy as np

from tailrace.config.source.column_policy import ColumnPolicy, ColumnRoles, MaskOptions
from tailrace.decode.tuples import Tuples
from tailrace.decode.types import known_type, numeric_shape
from tailrace.decode.values.masks import fixed, hashed, nulled, shortened
from tailrace.errors import Kind, TailraceError
from tailrace.model import Column, Relation, ReplicaIdentity, ValueModes
from tailrace.protocol.renames import Renames
from tailrace.secrets import Secret

_TEXT_OID = 25
#: Numeric types by oid, with the values that they hold: a column keeps its type if a fixed number fits.
_WHOLE = {oid: range(-(2**bits), 2**bits) for oid, bits in ((20, 63), (21, 15), (23, 31), (26, 63))}
_LARGEST = {700: float(np.finfo(np.float32).max), 701: float(np.finfo(np.float64).max)}
_DOUBLE, _NUMERIC = 701, 1700

FIXED_TEXT = "****"

_NO_RENAMES = Renames()


@dataclass(frozen=True, slots=True)
class Salt:
    """A resolved salt. Its repr does not show the value."""

    value: bytes = field(repr=False)

    @classmethod
    def of(cls, secret: Secret) -> Salt:
        """Return the salt that `secret` refers to, resolved in this process.

        :raises TailraceError: `SECRET_MISSING`; `CONFIG_INVALID` if it is empty.
        """
        value = secret.resolve()
        if not value:
            raise TailraceError(
                Kind.CONFIG_INVALID,
                f"resolve the salt {secret} of a mask: it is empty",
                "without a salt anyone can find the values by trying: give it 16 random characters or more",
            )
        return cls(value.encode())


@dataclass(frozen=True, slots=True)
class Shape:
    """The columns and masks that are applied to one version of a table.

    `kept` has the indexes in `source` of the columns of `relation`, in order; `masks` has indexes
    in `relation`.
    """

    source: Relation
    relation: Relation
    kept: tuple[int, ...]
    masks: tuple[tuple[int, MaskOptions, Salt | None], ...]

    def apply(self, tuples: Tuples) -> Tuples:
        """Return `tuples` of `source` as those of `relation`: columns left out and masked."""
        if len(self.kept) < len(self.source.columns):
            places = np.array(self.kept, np.intp)
            tuples = replace(
                tuples,
                current=tuples.current.of(places),
                old=tuples.old.of(places),
                in_key=tuples.in_key[places],
            )
        tuples = replace(tuples, relation=self.relation)
        for place, mask, salt in self.masks:
            if mask.method == "hash":
                assert salt is not None, "a mask that hashes has its salt"
                tuples = hashed(tuples, place, salt.value)
            elif mask.method == "fixed":
                tuples = fixed(tuples, place, fixed_text(mask).encode())
            elif mask.method == "truncate":
                shortened(tuples, place, mask.length or 0)
            else:
                nulled(tuples, place)
        return tuples


class TablePolicy:
    """The column policy of a log, with secrets resolved. Pickled without its cache of shapes.

    :param renames: former and later names of columns: rules follow a column that is renamed.
    """

    def __init__(self, rules: ColumnPolicy, salts: dict[str, Salt], renames: Renames = _NO_RENAMES) -> None:
        self._rules = rules
        self._salts = salts
        self._renames = renames
        self._shapes: dict[Relation, Shape | None] = {}
        self._everything = rules.discloses_all

    @classmethod
    def of(cls, rules: ColumnPolicy) -> TablePolicy:
        """Return the policy of `rules`, with the secrets resolved in this process.

        :raises TailraceError: `SECRET_MISSING`; `CONFIG_INVALID` if a salt is empty.
        """
        secrets = {str(mask.salt): mask.salt for mask in rules.masks if mask.salt is not None}
        return cls(rules, {name: Salt.of(secret) for name, secret in secrets.items()})

    def __repr__(self) -> str:
        return f"<TablePolicy: {self._rules!r}>"

    def __reduce__(self) -> tuple[type[TablePolicy], tuple[ColumnPolicy, dict[str, Salt], Renames]]:
        return TablePolicy, (self._rules, self._salts, self._renames)

    @property
    def discloses_all(self) -> bool:
        """Whether all columns are disclosed, none of them masked."""
        return self._everything

    def knowing(self, renames: Renames) -> TablePolicy:
        """Return the same policy with `renames` as the other names of columns."""
        return self if renames == self._renames else TablePolicy(self._rules, self._salts, renames)

    def shape(self, relation: Relation) -> Shape | None:
        """Return the shape of a table; None if the policy does not change the table.

        :raises TailraceError: `CONFIG_INVALID` if the settings would remove what identifies rows:
            a key that is left out, masked so that keys become equal, or not sent with deletes.
        """
        if self._everything:
            return None
        if relation not in self._shapes:
            self._shapes[relation] = self._shaped(relation)
        return self._shapes[relation]

    def relation(self, relation: Relation) -> Relation:
        """Return the table as consumers see it.

        :raises TailraceError: as `shape`.
        """
        shape = self.shape(relation)
        return relation if shape is None else shape.relation

    def mask_marks(self, relation: Relation) -> dict[str, str]:
        """Return, for each masked column of a table, a fingerprint of its mask.

        With equal fingerprints, equal values have equal masks. They reveal neither values nor salt.
        """
        columns = columns_of(relation, self._renames)
        found = {
            name: self._rules.mask_of(relation.schema, relation.table, name, columns)
            for name in columns.names
        }
        return {name: self._mark(mask) for name, mask in found.items() if mask is not None}

    def _mark(self, mask: MaskOptions) -> str:
        salt = self._salts.get(str(mask.salt))
        what = f"{mask.method} {mask.value!r} {mask.length}".encode()
        return hmac.digest(b"" if salt is None else salt.value, what, hashlib.sha256).hex()[:16]

    def _shaped(self, relation: Relation) -> Shape | None:
        rules, schema, table = self._rules, relation.schema, relation.table
        columns = columns_of(relation, self._renames)
        for conflict in rules.conflicts(schema, table, columns):
            raise TailraceError(
                Kind.CONFIG_INVALID,
                f"apply the column policy to a table: {conflict.message}",
                conflict.repair,
                {"table": relation.qualified_name},
            )
        left_out = rules.left_out(schema, table, columns)
        chosen = rules.key_of(schema, table)
        by_name = {
            name: rules.mask_of(schema, table, name, columns)
            for name in columns.names
            if name not in left_out
        }
        masks = {name: mask for name, mask in by_name.items() if mask is not None}
        if not (left_out or chosen or masks):
            return None
        salted = {let: (mask, self._salts.get(str(mask.salt))) for let, mask in masks.items()}
        found = reshaped(relation, left_out, salted)
        key = tuple(name for name in columns.names if name in chosen)
        return replace(found, relation=replace(found.relation, chosen_key=key))


def reshaped(
    relation: Relation, left_out: Collection[str], masks: Mapping[str, tuple[MaskOptions, Salt | None]]
) -> Shape:
    """Return the shape of a table without the columns `left_out`, and with masks by column."""
    kept = tuple(place for place, column in enumerate(relation.columns) if column.name not in left_out)
    let_out = [relation.columns[place] for place in kept]
    masked = [(at, *masks[column.name]) for at, column in enumerate(let_out) if column.name in masks]
    for at, mask, salt in masked:
        let_out[at] = _masked(let_out[at], mask, salt, relation.modes)
    primary_key = () if set(left_out) & set(relation.primary_key) else relation.primary_key
    return Shape(
        source=relation,
        relation=replace(
            relation,
            columns=tuple(let_out),
            primary_key=primary_key,
            chosen_key=tuple(name for name in relation.chosen_key if name not in left_out),
        ),
        kept=kept,
        masks=tuple(masked),
    )


#: The policy that discloses everything in the log, unmasked.
EVERYTHING = TablePolicy(ColumnPolicy(), {})


def _masked(column: Column, mask: MaskOptions, salt: Salt | None, modes: ValueModes) -> Column:
    """Return the column of the masked values. The value of rows that are older than it is masked, too."""
    missing = None if column.missing is None else _masked_text(column.missing, mask, salt)
    if mask.method == "null" or _keeps_type(column, mask, modes):
        return replace(column, missing=missing, not_null=column.not_null and mask.method != "null")
    return Column(
        column.name, _TEXT_OID, -1, column.in_identity, column.number, missing, column.unknown,
        not_null=column.not_null,
    )  # fmt: skip


def _masked_text(text: str, mask: MaskOptions, salt: Salt | None) -> str | None:
    if mask.method == "hash":
        assert salt is not None, "a mask that hashes has its salt"
        return hmac.digest(salt.value, text.encode(), hashlib.sha256).hex()
    if mask.method == "fixed":
        return fixed_text(mask)
    return text[: mask.length or 0] if mask.method == "truncate" else None


def _keeps_type(column: Column, mask: MaskOptions, modes: ValueModes) -> bool:
    """Return whether the value of a fixed mask is a number that the column's type can hold."""
    number, kind = mask.value, known_type(column)
    if mask.method != "fixed" or isinstance(number, str | None):
        return False
    oid = _DOUBLE if kind.oid == _NUMERIC and modes.decimal == "double" else kind.oid
    if oid in _WHOLE:
        return isinstance(number, int) and number in _WHOLE[oid]
    if oid in _LARGEST:
        return abs(number) <= _LARGEST[oid]
    shape = numeric_shape(kind.modifier)
    return oid == _NUMERIC and (shape is None or _fits(number, *shape))


def _fits(number: float, precision: int, scale: int) -> bool:
    """Return whether `numeric(precision, scale)` holds a number exactly."""
    unscaled = Fraction(str(number)) * Fraction(10) ** scale
    return unscaled.denominator == 1 and abs(unscaled) < 10**precision


def fixed_text(mask: MaskOptions) -> str:
    """Return the text of the value of a fixed mask."""
    if isinstance(mask.value, str | None):
        return FIXED_TEXT if mask.value is None else mask.value
    return format(Decimal(str(mask.value)), "f")  # PostgreSQL's `numeric` has no exponents


def columns_of(relation: Relation, renames: Renames = _NO_RENAMES) -> ColumnRoles:
    """Return the roles of a table's columns (identity, primary key), with the names that they have had."""
    return ColumnRoles(
        names=tuple(column.name for column in relation.columns),
        identity=frozenset(column.name for column in relation.columns if column.in_identity),
        full=relation.identity is ReplicaIdentity.FULL,
        primary_key=frozenset(relation.primary_key),
        renamed=renames.of(relation.oid, relation.columns),
    )
