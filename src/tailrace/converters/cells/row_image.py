"""Row images of changes, column by column: cells of the source, or values of Kafka Connect."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tailrace.converters.cells.connect_values import of_cells
from tailrace.converters.cells.json_values import Values, json_texts
from tailrace.converters.connect_schemas import written
from tailrace.converters.debezium_types import TypeMapping
from tailrace.decode import kernel
from tailrace.decode.gather import TEXT_BYTES_MAX, Cells, text_cells
from tailrace.decode.json.documents import ColumnTexts
from tailrace.decode.tuples import Spans
from tailrace.decode.values import forms
from tailrace.decode.values.floats import has_long_and_large
from tailrace.errors import Kind, TailraceError
from tailrace.protocol.frames import Bytes


@dataclass(frozen=True, slots=True)
class Field:
    """A column of the output: its name, its type's mapping, and whether it is NOT NULL."""

    name: str
    how: TypeMapping
    not_null: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ColumnValues:
    """A column's values, and the kind of each change's value (`kernel.TEXT`: there is a value)."""

    values: Values
    kind: Bytes


@dataclass(frozen=True, slots=True, eq=False)
class RowCells:
    """Columns as cells in a buffer, each with a style; `old` has as many changes as `current`, or none."""

    styles: Sequence[int]
    buffer: Bytes
    current: Spans
    old: Spans


class RowImage:
    """Columns before and after each change, as cells of the source or as values. The other form is computed
    on first access.

    :param cells: the cells; None: `current` and `old` are given (`old` is empty if there is no row before).
    :param is_single: for a key: it consists of a single column without a name.
    """

    def __init__(
        self,
        fields: Sequence[Field],
        count: int,
        cells: RowCells | None = None,
        current: Sequence[ColumnValues] = (),
        old: Sequence[ColumnValues] = (),
        *,
        is_single: bool = False,
    ) -> None:
        self.fields = fields
        self.is_single = is_single
        self._count = count
        self._cells = cells
        self._current = current
        self._old = old

    @functools.cached_property
    def cells(self) -> RowCells:
        """The cells; those computed from values contain JSON.

        :raises TailraceError: `DECODE_FAILED`.
        """
        if self._cells is not None:
            return _rounded(self._cells, self.fields)
        parts: list[Bytes] = []
        current = _spans(self._current, self._count, parts)
        old = _spans(self._old, self._count, parts) if self._old else Spans.empty(len(self.fields), 0)
        return RowCells([forms.RAW] * len(self.fields), together(parts), current, old)

    @property
    def current(self) -> Sequence[ColumnValues]:
        """The values after each change.

        :raises TailraceError: `DECODE_FAILED`.
        """
        return self._current if self._cells is None else self._read(self._cells.current)

    @property
    def old(self) -> Sequence[ColumnValues]:
        """The values before each change; empty if there are none."""
        if self._cells is None:
            return self._old
        return self._read(self._cells.old) if self._cells.old.start.shape[1] else ()

    def taken(self, places: Sequence[int]) -> RowImage:
        """Return these columns of cells of the source."""
        cells, at = self._cells, np.array(places, np.intp)
        assert cells is not None

        styles = [cells.styles[place] for place in places]
        of_places = RowCells(styles, cells.buffer, cells.current.of(at), cells.old.of(at))
        return RowImage([self.fields[place] for place in places], self._count, of_places)

    def _read(self, spans: Spans) -> list[ColumnValues]:
        assert self._cells is not None
        found = zip(self.fields, *spans.arrays, strict=True)
        buffer = self._cells.buffer
        return [
            ColumnValues(of_cells(Cells(buffer, start, length, kind), field.how), kind)
            for field, start, length, kind in found
        ]

    def kinds(self) -> tuple[Bytes, Bytes]:
        """Return the kinds of values after and before: arrays of (column, change); empty: there are none."""
        if self._cells is not None:
            return self._cells.current.kind, self._cells.old.kind
        nothing = np.empty((len(self.fields), 0), np.uint8)
        current, old = ([column.kind for column in side] for side in (self._current, self._old))
        return np.stack(current) if current else nothing, np.stack(old) if old else nothing


def _spans(columns: Sequence[ColumnValues], count: int, parts: list[Bytes]) -> Spans:
    # Cells of JSON, whose bytes are appended to `parts`.
    spans = Spans.empty(len(columns), count)
    size = sum(map(len, parts))
    for place, column in enumerate(columns):
        cells = text_cells(json_texts(column.values))
        size += len(cells.buffer)
        require_room(size)
        spans.start[place] = cells.start + np.int32(size - len(cells.buffer))
        spans.length[place], spans.kind[place] = cells.length, column.kind
        parts.append(cells.buffer)
    return spans


def absent_text(field: Field) -> str:
    """Return the JSON in place of a value that was not sent, in a row image with all columns."""
    return field.how.zero if field.not_null else "null"


def columns_of(side: RowImage, unavailable: Sequence[str], absent: Sequence[str]) -> ColumnTexts:
    """Return the texts and styles with which the columns of row images are written."""
    names = [written(field.name) + ":" for field in side.fields]
    return ColumnTexts(names, side.cells.styles, unavailable, absent)


def _rounded(cells: RowCells, fields: Sequence[Field]) -> RowCells:
    # Numbers that become doubles are converted column by column and appended to the buffer, as are
    # floating-point numbers whose digits may have to change.
    current, old = cells.current, cells.old
    places = [
        place
        for place, field in enumerate(fields)
        if field.how.is_rounded or (field.how.is_floating and _is_long(cells, place))
    ]
    if not places:
        return cells
    current, old = current.copy(), old.copy()
    styles, parts, size = list(cells.styles), [cells.buffer], len(cells.buffer)
    for place in places:
        for spans in (current, old):
            if spans.start.shape[1] == 0:
                continue
            raw = Cells(cells.buffer, spans.start[place], spans.length[place], spans.kind[place].copy())
            size = _put(spans, place, json_texts(of_cells(raw, fields[place].how)), parts, size)
        styles[place] = forms.RAW
    return RowCells(styles, together(parts), current, old)


def _is_long(cells: RowCells, place: int) -> bool:
    return any(
        spans.start.shape[1] > 0
        and has_long_and_large(cells.buffer, spans.start[place], spans.length[place], spans.kind[place])
        for spans in (cells.current, cells.old)
    )


def _put(spans: Spans, place: int, texts: pa.Array, parts: list[Bytes], size: int) -> int:
    # Replaces a column's cells that are texts; returns the size of the buffers, including the new texts.
    cells = text_cells(texts)
    there = spans.kind[place] == kernel.TEXT
    spans.start[place] = np.where(there, cells.start + np.int64(size), 0)
    spans.length[place] = np.where(there, cells.length, 0)
    parts.append(cells.buffer)
    require_room(size + len(cells.buffer))
    return size + len(cells.buffer)


def together(parts: Sequence[Bytes]) -> Bytes:
    """Return the buffers concatenated.

    :raises TailraceError: `DECODE_FAILED` if they are longer than 2 GiB.
    """
    require_room(sum(map(len, parts)))
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)


def require_room(size: int) -> None:
    """Check that places in a buffer of `size` bytes fit into 31 bits.

    :raises TailraceError: `DECODE_FAILED` if not.
    """
    if size > TEXT_BYTES_MAX:
        raise TailraceError(
            Kind.DECODE_FAILED,
            "converted records: the texts of a group are longer than 2 GiB",
            "use smaller batches",
        )
