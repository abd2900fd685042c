"""Divides a table into chunks that are read separately. Pure: facts in, ranges and SQL out.

The rows of a table are in one relation or several: the table itself, or its leaf partitions. Each is
divided at *bounds* into ranges that together cover everything, for any bounds: the first range is
open below, the last is open above, and each bound belongs to the range that it begins. Bounds are
keys, as the server writes and compares them, or pages if there is no usable key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tailrace.sources.postgres.connection.quoting import quote_identifier, quote_literal, quote_table

#: Maximum number of chunks of one relation; a larger relation gets larger chunks.
CHUNKS_MAX = 20_000

PAGE_BYTES = 8192


@dataclass(frozen=True, slots=True)
class KeyColumn:
    """A column of the key whose values are the bounds of chunks, and its type in SQL."""

    name: str
    type: str


@dataclass(frozen=True, slots=True)
class ChunkedRelation:
    """One physical relation and the bounds of its chunks.

    `key` is empty if the bounds are pages. `shape` is a digest of the relation as it was planned.
    `gone`: it no longer belongs to the table; its chunks keep their numbers.
    """

    oid: int
    schema: str
    name: str
    key: tuple[KeyColumn, ...]
    bounds: tuple[tuple[str, ...], ...]
    shape: str
    gone: bool = False

    @property
    def chunks(self) -> int:
        """The relation's number of chunks."""
        return len(self.bounds) + 1

    @property
    def sql(self) -> str:
        """Return its quoted name for SQL."""
        return quote_table(self.schema, self.name)

    def condition(self, chunk: int) -> str:
        """Return the SQL condition for the rows of chunk `chunk`, from 0; empty: all rows."""
        lower = self.bounds[chunk - 1] if chunk else None
        upper = self.bounds[chunk] if chunk < len(self.bounds) else None
        parts = [
            f"{self._place()} {operator} {self._literal(bound)}"
            for operator, bound in ((">=", lower), ("<", upper))
            if bound is not None
        ]
        return " AND ".join(parts)

    def as_json(self) -> list[Any]:
        key = [[column.name, column.type] for column in self.key]
        bounds = [list(bound) for bound in self.bounds]
        return [self.oid, self.schema, self.name, key, bounds, self.shape, self.gone]

    @classmethod
    def from_json(cls, content: Sequence[Any]) -> ChunkedRelation:
        oid, schema, name, key, bounds, shape, *gone = content
        return cls(
            int(oid),
            str(schema),
            str(name),
            tuple(KeyColumn(*column) for column in key),
            tuple(tuple(bound) for bound in bounds),
            str(shape),
            any(gone),
        )

    def _place(self) -> str:
        if not self.key:
            return "ctid"
        return f"({', '.join(quote_identifier(column.name) for column in self.key)})"

    def _literal(self, bound: tuple[str, ...]) -> str:
        if not self.key:
            return f"'({int(bound[0])},0)'::tid"
        values = (
            f"{quote_literal(value)}::{column.type}" for value, column in zip(bound, self.key, strict=True)
        )
        return f"({', '.join(values)})"


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of a table: its number among the table's chunks, its relation, and the part of that."""

    number: int
    relation: ChunkedRelation
    part: int  # of the relation, from 0

    def copy_command(self, table: str, columns: Sequence[str | None], filters: Sequence[str]) -> str:
        """Return the COPY command that reads its rows.

        :param table: the name that `filters` may give the relation, which may be a partition.
        :param columns: names in the order of the log's columns; None: NULL instead of the values.
        :param filters: further SQL conditions on the rows.
        """
        conditions = [f"({text})" for text in (*filters, self.relation.condition(self.part)) if text]
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        named = ", ".join("NULL" if name is None else quote_identifier(name) for name in columns)
        source = f"ONLY {self.relation.sql}"
        if self.relation.name != table:
            source += f" AS {quote_identifier(table)}"
        return f"COPY (SELECT {named} FROM {source}{where}) TO STDOUT"  # noqa: S608 - quoted


def chunks_of(relations: Sequence[ChunkedRelation]) -> Iterator[Chunk]:
    """Yield the chunks of a table in order."""
    number = 0
    for relation in relations:
        for part in range(relation.chunks):
            yield Chunk(number, relation, part)
            number += 1


def whole_of(relations: Sequence[ChunkedRelation]) -> Iterator[Chunk]:
    """Yield one chunk for each relation, with all of its rows, numbered from 0."""
    for number, relation in enumerate(relations):
        yield Chunk(number, replace(relation, bounds=()), 0)


def written_since(xid: int) -> str:
    """Return the SQL condition for rows whose version was written by transaction `xid` or a later one."""
    return f"age(xmin) <= age('{xid}'::xid)"


def chunks_wanted(rows: int, size_bytes: int, *, rows_max: int, bytes_max: int) -> int:
    """Return the number of chunks, of about equal size, into which a relation is divided."""
    wanted = max(-(-rows // rows_max), -(-size_bytes // bytes_max), 1)
    return min(wanted, CHUNKS_MAX)


def page_bounds(pages: int, chunks: int) -> tuple[tuple[str, ...], ...]:
    """Return bounds that divide `pages` pages into up to `chunks` ranges of similar size."""
    firsts = sorted({pages * number // chunks for number in range(1, chunks)} - {0})
    return tuple((str(page),) for page in firsts)


def sample_percent(pages: int, chunks: int) -> float:
    """Return the share of the pages to sample for `chunks` key ranges, in percent.

    With thirty pages per chunk, sizes differ by about a fifth; a key in physical order
    contributes only one value per page.
    """
    wanted = min(pages, max(30 * chunks, 300), 60_000)
    return max(0.0001, min(100.0, 100.0 * wanted / max(1, pages)))


def sample_query(relation: ChunkedRelation, percent: float, chunks: int, *, ascii_only: bool = False) -> str:
    """Return the SQL that returns the bounds of `chunks` ranges, in order; columns k0, k1, … as text.

    :param ascii_only: only ASCII bounds: other characters may be changed by the conversion of encodings, so
        that the bound sorts elsewhere and ranges overlap.
    """
    names = [quote_identifier(column.name) for column in relation.key]
    order = ", ".join(names)
    values = ", ".join(f"{name}::text AS k{number}" for number, name in enumerate(names))
    ascii_text = "{}::text COLLATE \"C\" !~ '[^\\x01-\\x7f]'"  # some collations have no expressions
    usable = " AND ".join(ascii_text.format(name) for name in names) if ascii_only else "true"
    return (
        f"WITH sampled AS MATERIALIZED (SELECT {order} FROM ONLY {relation.sql} "  # noqa: S608 - quoted
        f"TABLESAMPLE SYSTEM ({percent:.6f}) REPEATABLE (1) WHERE {usable}), "
        f"tiled AS (SELECT {order}, ntile({chunks}) OVER (ORDER BY {order}) AS tile FROM sampled), "
        f"firsts AS (SELECT *, row_number() OVER (PARTITION BY tile ORDER BY {order}) AS place FROM tiled) "
        f"SELECT {values} FROM firsts WHERE tile > 1 AND place = 1 ORDER BY tile"
    )
