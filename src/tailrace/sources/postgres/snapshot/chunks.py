"""How a table is cut into chunks that are read apart. Pure: facts in, ranges and SQL out.

The rows of a table are in one relation, or in several: the table itself, or its leaf partitions. Each is
cut at *bounds* into ranges that together cover everything, whatever the bounds are: the first
is open below, the last open above, each bound belongs to the range that it begins. Bounds are
keys, as the server wrote them and as it compares them, or pages where there is no usable key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tailrace.sources.postgres.connection.quoting import quote_identifier, quote_literal, quote_table

#: More chunks than this are not made of one relation: they become larger instead.
CHUNKS_MAX = 20_000

PAGE_BYTES = 8192


@dataclass(frozen=True, slots=True)
class KeyColumn:
    """A column of the key that chunks are cut by, and its type as SQL writes it."""

    name: str
    type: str


@dataclass(frozen=True, slots=True)
class ChunkedRelation:
    """One physical relation and where it is cut.

    `key` is empty where the bounds are pages. `only`: children of an inheritance tree are
    relations of other tables. `shape` is a digest of the relation as it was planned.
    `gone`: it is no part of the table any more; its chunks keep their numbers.
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
        """Into how many chunks it is cut."""
        return len(self.bounds) + 1

    @property
    def sql(self) -> str:
        """Return its name as SQL holds it."""
        return quote_table(self.schema, self.name)

    def condition(self, chunk: int) -> str:
        """Return what is true of the rows of chunk `chunk`, from 0; empty if of all rows."""
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
    """One chunk of a table: its number among all of the table's, the relation, and the part of it."""

    number: int
    relation: ChunkedRelation
    part: int  # of the relation, from 0

    def copy_command(self, columns: Sequence[str | None], filters: Sequence[str]) -> str:
        """Return COPY of its rows.

        :param columns: names, in the order in which the log has them; None: NULL in place of the values.
        :param filters: SQL conditions that a row must meet besides.
        """
        conditions = [f"({text})" for text in (*filters, self.relation.condition(self.part)) if text]
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        named = ", ".join("NULL" if name is None else quote_identifier(name) for name in columns)
        return f"COPY (SELECT {named} FROM ONLY {self.relation.sql}{where}) TO STDOUT"  # noqa: S608 - quoted


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
    """Return a condition that is true of rows whose version transaction `xid` or a later one wrote."""
    return f"age(xmin) <= age('{xid}'::xid)"


def chunks_wanted(rows: int, size_bytes: int, *, rows_max: int, bytes_max: int) -> int:
    """Return how many chunks of about equal size a relation is to be cut into."""
    wanted = max(-(-rows // rows_max), -(-size_bytes // bytes_max), 1)
    return min(wanted, CHUNKS_MAX)


def page_bounds(pages: int, chunks: int) -> tuple[tuple[str, ...], ...]:
    """Return bounds that cut `pages` pages into up to `chunks` ranges of like size."""
    firsts = sorted({pages * number // chunks for number in range(1, chunks)} - {0})
    return tuple((str(page),) for page in firsts)


def sample_percent(pages: int, chunks: int) -> float:
    """Return what share of the pages to sample for `chunks` key ranges, in percent.

    Thirty pages a chunk leave its size within about a fifth of the others'; a key that follows
    the physical order has one value a page to offer.
    """
    wanted = min(pages, max(30 * chunks, 300), 60_000)
    return max(0.0001, min(100.0, 100.0 * wanted / max(1, pages)))


def sample_query(relation: ChunkedRelation, percent: float, chunks: int, *, ascii_only: bool = False) -> str:
    """Return SQL for the bounds of `chunks` ranges, in order; columns k0, k1, … as text.

    :param ascii_only: take no bound that another encoding than the database's may not have: written otherwise
        than it was read it would stand elsewhere in the order, and ranges overlap.
    """
    names = [quote_identifier(column.name) for column in relation.key]
    order = ", ".join(names)
    values = ", ".join(f"{name}::text AS k{number}" for number, name in enumerate(names))
    usable = " AND ".join(f"{name}::text !~ '[^\\x01-\\x7f]'" for name in names) if ascii_only else "true"
    return (
        f"WITH sampled AS MATERIALIZED (SELECT {order} FROM ONLY {relation.sql} "  # noqa: S608 - quoted
        f"TABLESAMPLE SYSTEM ({percent:.6f}) REPEATABLE (1) WHERE {usable}), "
        f"tiled AS (SELECT {order}, ntile({chunks}) OVER (ORDER BY {order}) AS tile FROM sampled), "
        f"firsts AS (SELECT *, row_number() OVER (PARTITION BY tile ORDER BY {order}) AS place FROM tiled) "
        f"SELECT {values} FROM firsts WHERE tile > 1 AND place = 1 ORDER BY tile"
    )
