"""The column policy: which columns readers of the log get, how they are masked, and keys that users chose.

The log has everything that the server sent. These settings apply to all reading of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, model_validator

from tailrace.config.fields import Section
from tailrace.config.patterns import ColumnPattern, TablePattern, matches, matches_column, one_column
from tailrace.secrets import Secret


def _mask_method(value: object) -> object:
    return "null" if value is None else value  # an unquoted null in YAML is None


def _mask_constant(value: object) -> object:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number and not isinstance(value, str):
        raise ValueError("must be text or a number")
    if isinstance(value, str) and "\0" in value:
        raise ValueError("must be text without a NUL byte")
    return value


def _columns(value: tuple[ColumnPattern, ...]) -> tuple[ColumnPattern, ...]:
    if not value:
        raise ValueError("must name at least one column")
    return value


def _key(value: tuple[str, ...]) -> tuple[str, ...]:
    if not value or "" in value or len(set(value)) != len(value):
        raise ValueError("must be a list of names of columns, each once")
    return value


MaskMethod = Annotated[Literal["hash", "fixed", "truncate", "null"], BeforeValidator(_mask_method)]


class MaskOptions(Section):
    """The method of a mask and its parameters."""

    method: MaskMethod = Field(
        description="`hash`: HMAC-SHA-256 of the value's text, 64 hexadecimal digits; `fixed`: `value`; "
        "`truncate`: the first `length` characters; `null`: NULL. NULL stays NULL with every method."
    )
    salt: Secret | None = Field(
        default=None,
        description="Key of `hash`, by reference only. With the same salt, equal values have equal hashes in "
        "all tables.",
    )
    value: Annotated[str | int | float, PlainValidator(_mask_constant)] | None = Field(
        default=None,
        description="Value of `fixed`; default `****`. A column of numbers keeps its type if `value` is a "
        "number of that type; otherwise it becomes text.",
    )
    length: Annotated[int, Field(ge=0, le=1_000_000)] | None = Field(
        default=None, description="Characters that `truncate` keeps."
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for name, method in (("salt", "hash"), ("value", "fixed"), ("length", "truncate")):
            if getattr(self, name) is not None and self.method != method:
                raise ValueError(f"{name} belongs to the method {method}, and the method is {self.method}")
        if self.method == "hash" and self.salt is None:
            raise ValueError("hash needs a salt: a reference, ${env:NAME} or ${file:/path}")
        if self.method == "truncate" and self.length is None:
            raise ValueError("truncate needs a length")
        return self


class ColumnMask(MaskOptions):
    """A mask for the values of some columns."""

    columns: Annotated[tuple[ColumnPattern, ...], AfterValidator(_columns)] = Field(
        description="Columns: `schema.table.column`, `*` for any run of characters; or "
        "`/a regular expression/` for the whole name."
    )

    def means(self, schema: str, table: str, column: str) -> bool:
        """Return whether this mask applies to the column."""
        return any(matches_column(pattern, schema, table, column) for pattern in self.columns)


@dataclass(frozen=True, slots=True)
class ColumnRoles:
    """A table's columns, its keys, and earlier names of columns, as far as the settings depend on them.

    `identity` are the columns that updates and deletes send of the old row; `full`: they send all.
    `primary_key` is the key under `full`, and if there is no identity. `renamed` has, by its current name,
    each column that has had other names (schema, table, column), with all of them, the oldest first.
    """

    names: tuple[str, ...]
    identity: frozenset[str]
    full: bool
    primary_key: frozenset[str]
    renamed: Mapping[str, tuple[tuple[str, str, str], ...]] = field(default_factory=dict)

    def key(self, chosen: tuple[str, ...]) -> frozenset[str]:
        """Return the columns that identify a row."""
        return frozenset(chosen) or (self.primary_key if self.full else self.identity or self.primary_key)

    def names_of(self, schema: str, table: str, column: str) -> tuple[tuple[str, str, str], ...]:
        """Return all earlier names of the column and its current one, the oldest first."""
        return tuple(dict.fromkeys((*self.renamed.get(column, ()), (schema, table, column))))


@dataclass(frozen=True, slots=True)
class Conflict:
    """A reason why the settings can't apply to a table, and its repair. Without values of rows."""

    message: str
    repair: str
    needs_full: bool = False  # REPLICA IDENTITY FULL would be a repair, too


class ColumnPolicy(Section):
    """Settings of a source for the columns that readers of the log get."""

    columns: tuple[ColumnPattern, ...] = Field(
        default=(),
        description="Columns to keep, in each table with a column that matches one of these patterns; its "
        "key is always kept, and other tables keep all columns. `schema.table.column` with `*`, or "
        "`/a regular expression/`.",
    )
    columns_exclude: tuple[ColumnPattern, ...] = Field(
        default=(), description="Columns to leave out; patterns as in `columns`. A key can't be left out."
    )
    masks: tuple[ColumnMask, ...] = Field(
        default=(), description="Columns whose values are masked; the first mask that matches counts."
    )
    message_keys: dict[TablePattern, Annotated[tuple[str, ...], AfterValidator(_key)]] = Field(
        default={},
        description="Columns of a table's key, by pattern of tables, for tables without a key or with "
        "another one. The first pattern that matches counts.",
    )

    @property
    def disclosure(self) -> ColumnPolicy:
        """These settings, without the others of the source."""
        return ColumnPolicy(**{name: getattr(self, name) for name in ColumnPolicy.model_fields})

    @property
    def discloses_all(self) -> bool:
        """Whether readers get all columns, unmasked and with their own keys."""
        return not (self.columns or self.columns_exclude or self.masks or self.message_keys)

    @property
    def leaves_columns_out(self) -> bool:
        """Whether columns of some table may be left out."""
        return bool(self.columns or self.columns_exclude)

    def column_patterns(self) -> list[tuple[str, str]]:
        """Return all patterns of columns, each after the name of its setting."""
        places = {"source.columns": self.columns, "source.columns_exclude": self.columns_exclude}
        places |= {f"source.masks[{number}].columns": mask.columns for number, mask in enumerate(self.masks)}
        return [(place, pattern) for place, patterns in places.items() for pattern in patterns]

    def unmatched_patterns(
        self, names: Collection[tuple[str, str, str]], kept: ColumnPolicy
    ) -> Iterator[tuple[str, str, tuple[str, str, str] | None]]:
        """Yield the patterns of columns that match no column.

        :param names: schema, table and name of each column.
        :param kept: the settings with which the log was last used.
        :return: for each, the name of its setting; the pattern; and the column, if it names a single one and
            `kept` does not have the pattern.
        """
        before = {pattern for _, pattern in kept.column_patterns()}
        for place, pattern in self.column_patterns():
            if not any(matches_column(pattern, *name) for name in names):
                yield place, pattern, None if pattern in before else one_column(pattern)

    def left_out(self, schema: str, table: str, columns: ColumnRoles) -> frozenset[str]:
        """Return a table's columns that readers do not get; they always get its key.

        A column that is left out under one of its names is left out under all of them.
        """
        unwanted = self._unwanted(schema, table, columns) | self._excluded(schema, table, columns)
        return frozenset(unwanted - columns.key(self.key_of(schema, table)))

    def _excluded(self, schema: str, table: str, columns: ColumnRoles) -> set[str]:
        return {
            column
            for column in columns.names
            if any(_any(self.columns_exclude, *name) for name in columns.names_of(schema, table, column))
        }

    def _unwanted(self, schema: str, table: str, columns: ColumnRoles) -> set[str]:
        """Return the columns that the setting `columns` does not keep: their oldest name decides."""
        kept = self._kept(schema, table, columns)
        return {column for column, each in kept.items() if not each[0]}

    def _kept(self, schema: str, table: str, columns: ColumnRoles) -> dict[str, list[bool]]:
        """Return, for each column, whether the setting `columns` keeps it under each of its names, the
        oldest first; without names that belong to a table's name that no pattern concerns.
        """
        names = {column: columns.names_of(schema, table, column) for column in columns.names}
        kept = {name for each in names.values() for name in each if _any(self.columns, *name)}
        concerned = {name[:2] for name in kept}
        found = {
            column: [name in kept for name in each if name[:2] in concerned] for column, each in names.items()
        }
        return {column: each for column, each in found.items() if each}

    def conflicts(self, schema: str, table: str, columns: ColumnRoles) -> list[Conflict]:
        """Return the reasons why rows of a table could not be identified with these settings."""
        found: list[Conflict] = []
        chosen = self.key_of(schema, table)
        key = columns.key(chosen)
        if missing := set(chosen) - set(columns.names):
            found.append(
                _conflict("source.message_keys names columns that the table lacks:", missing, "correct it")
            )
        elif not columns.full and columns.identity and (silent := set(chosen) - columns.identity):
            found.append(
                _conflict(
                    "source.message_keys names what updates and deletes don't send of the old row:",
                    silent,
                    "give it REPLICA IDENTITY FULL, or take the table out of source.message_keys",
                    needs_full=True,
                )
            )
        excluded = self._excluded(schema, table, columns)
        if needed := key & excluded:
            found.append(
                _conflict(
                    "source.columns_exclude leaves out what the table's key needs:",
                    needed,
                    "correct it; a column of a key may be masked by a hash instead",
                )
            )
        kept = self._kept(schema, table, columns)
        if unclear := {name for name, each in kept.items() if not each[0] and any(each)} - key - excluded:
            found.append(
                _conflict(
                    "source.columns keeps columns that were renamed, but not under the name that they had "
                    "first:",
                    unclear,
                    "name them in source.columns under each of their names if readers may get them, or in "
                    "source.columns_exclude if not",
                )
            )
        for name in sorted(key & set(columns.names)):
            mask = self.mask_of(schema, table, name, columns)
            if mask is not None and mask.method != "hash":
                found.append(
                    _conflict(
                        f"source.masks has the method {mask.method}, which makes different keys equal, for",
                        {name},
                        "mask it by a hash, which keeps different values different",
                    )
                )
        return found

    def mask_of(
        self, schema: str, table: str, column: str, columns: ColumnRoles | None = None
    ) -> ColumnMask | None:
        """Return the column's mask; None if it has none.

        The oldest of its names that a mask matches decides.

        :param columns: of the table; None: the column has had no other names.
        """
        names = [(schema, table, column)] if columns is None else columns.names_of(schema, table, column)
        return next((mask for name in names for mask in self.masks if mask.means(*name)), None)

    def key_of(self, schema: str, table: str) -> tuple[str, ...]:
        """Return the key that `message_keys` gives the table; empty if none."""
        keys = (key for pattern, key in self.message_keys.items() if matches(pattern, schema, table))
        return next(keys, ())


def _any(patterns: tuple[str, ...], schema: str, table: str, column: str) -> bool:
    return any(matches_column(pattern, schema, table, column) for pattern in patterns)


def _conflict(
    message: str, columns: set[str] | frozenset[str], repair: str, *, needs_full: bool = False
) -> Conflict:
    return Conflict(f"{message} {', '.join(map(repr, sorted(columns)))}", repair, needs_full)
