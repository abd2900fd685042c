"""Pictures of changes as the source sent them: cells point into the block that they came in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.converters.cells.change_table import (
    ChangeTable,
    Field,
    RowImage,
    fields_of,
    key_names,
    numbers_of,
    replaced,
    together,
)
from tailrace.converters.cells.texts import json_texts, text_cells
from tailrace.converters.connect_schemas import STRING
from tailrace.converters.debezium_types import TypeMapping, debezium_modes, given_arrow
from tailrace.model import OWN_FORMS, Relation
from tailrace.protocol.frames import Bytes
from tailrace.sources.postgres.decode import kernel
from tailrace.sources.postgres.decode.envelope import image_choices
from tailrace.sources.postgres.decode.gather import Cells
from tailrace.sources.postgres.decode.json.documents import render
from tailrace.sources.postgres.decode.tuples import Spans, Tuples
from tailrace.sources.postgres.decode.types import known_type, value_type
from tailrace.sources.postgres.decode.values import forms
from tailrace.sources.postgres.decode.values.floats import has_long_and_large


def of_wire(tuples: Tuples) -> ChangeTable:
    """Return the picture of changes.

    :raises TailraceError: `DECODE_FAILED`.
    """
    relation = tuples.relation
    count = len(tuples)
    if relation is None:
        modes = debezium_modes(OWN_FORMS)
        content = given_arrow(pa.binary(), modes)
        fields = [Field("prefix", TypeMapping(forms.QUOTED, STRING, "null")), Field("content", content)]
        row = RowImage(fields, [forms.QUOTED, forms.BASE64], tuples.buffer, tuples.current, tuples.old)
        choice = np.stack([np.zeros(count, np.uint8), np.ones(count, np.uint8)])
        wanted = np.ones((2, 2), np.bool_)
        places = [0]
    else:
        modes = debezium_modes(relation.modes)
        row = _rounded(relation, tuples, fields_of(relation))
        choice = np.stack(image_choices(tuples))
        wanted = np.stack([np.ones(len(relation.columns), np.bool_), tuples.in_key])
        places = [row_place(row.fields, name) for name in key_names(relation)]
    key = _taken(row, places) if places else None
    numbers = numbers_of(
        tuples.fields[kernel.AT_COMMIT_TIME], tuples.fields[kernel.AT_COMMIT_LSN], tuples.fields[kernel.LSN],
        tuples.fields[kernel.AT_XID], tuples.fields[kernel.AT_ORDINAL],
    )  # fmt: skip
    schema, table = (relation.schema, relation.table) if relation else ("", "")
    return ChangeTable(tuples.op, choice, wanted, row, key, numbers, schema, table, modes)


def row_place(fields: Sequence[Field], name: str) -> int:
    """Return the place of a column."""
    return next(place for place, field in enumerate(fields) if field.name == name)


def _taken(row: RowImage, places: Sequence[int]) -> RowImage:
    def taken(spans: Spans) -> Spans:
        at = np.array(places, np.intp)
        return Spans(spans.start[at], spans.length[at], spans.kind[at])

    return RowImage(
        [row.fields[place] for place in places], [row.styles[place] for place in places], row.buffer,
        taken(row.current), taken(row.old),
    )  # fmt: skip


def _rounded(relation: Relation, tuples: Tuples, fields: list[Field]) -> RowImage:
    # Numbers that become doubles are read column by column and stand behind the block, and so are
    # floating-point numbers whose digits may have to change.
    current, old = tuples.current, tuples.old
    places = [
        place
        for place, field in enumerate(fields)
        if field.how.is_rounded or (field.how.is_floating and _is_long(tuples, place))
    ]
    styles = [field.how.style for field in fields]
    if not places:
        return RowImage(fields, styles, tuples.buffer, current, old)
    current, old = _copied(current), _copied(old)
    parts, size = [tuples.buffer], len(tuples.buffer)
    for place in places:
        kind = value_type(known_type(relation.columns[place]), debezium_modes(relation.modes))
        for spans in (current, old):
            if spans.start.shape[1] == 0:
                continue
            raw = Cells(tuples.buffer, spans.start[place], spans.length[place], spans.kind[place].copy())
            typed = kind.read(raw)
            texts = _with_special(
                json_texts(typed.values, fields[place].how), typed.special_rows, raw, fields[place].how
            )
            size = _put(spans, place, texts, parts, size)
        styles[place] = forms.RAW
    return RowImage(fields, styles, together(parts, size), current, old)


def _is_long(tuples: Tuples, place: int) -> bool:
    return any(
        spans.start.shape[1] > 0
        and has_long_and_large(tuples.buffer, spans.start[place], spans.length[place], spans.kind[place])
        for spans in (tuples.current, tuples.old)
    )


def _with_special(texts: pa.Array, rows: npt.NDArray[np.int64], raw: Cells, how: TypeMapping) -> pa.Array:
    if len(rows) == 0:
        return texts
    odd = Cells(raw.buffer, raw.start[rows], raw.length[rows], raw.kind[rows])
    return replaced(texts, rows, render(odd, how.style))


def _copied(spans: Spans) -> Spans:
    return Spans(spans.start.copy(), spans.length.copy(), spans.kind.copy())


def _put(spans: Spans, place: int, texts: pa.Array, parts: list[Bytes], size: int) -> int:
    # Lets a column's cells, where they are texts, be these; returns the buffers' size with them.
    cells = text_cells(texts)
    there = spans.kind[place] == kernel.TEXT
    spans.start[place] = np.where(there, cells.start + np.int64(size), 0)
    spans.length[place] = np.where(there, cells.length, 0)
    parts.append(cells.buffer)
    return size + len(cells.buffer)
