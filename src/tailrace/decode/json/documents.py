"""JSON documents of changes, written by the kernel of `json_kernel` into one Arrow array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.decode.gather import Cells, bit_map, require_utf8, text_buffers
from tailrace.decode.json import json_kernel
from tailrace.decode.json.templates import Template
from tailrace.decode.kernel import TEXT
from tailrace.decode.tuples import Spans
from tailrace.protocol.frames import Bytes, Numbers

#: The least that is set aside for documents at once.
_CHUNK_BYTES_MIN = 1 << 16

#: Behind what is written: texts are copied by words.
_SPARE_BYTES = 8


@dataclass(frozen=True, slots=True)
class ColumnTexts:
    """How columns are written: a text for each, JSON but for the styles.

    :param names: with the quotes and the colon.
    :param unavailable: what stands for a value that was not sent.
    :param absent: what stands for a column that is not there; "" leaves it out.
    """

    names: Sequence[str]
    styles: Sequence[int]
    unavailable: Sequence[str]
    absent: Sequence[str]


@dataclass(frozen=True, slots=True, eq=False)
class CodedTexts:
    """Texts that many changes have in common; `json_kernel.CODED` names a list of them in a template.

    :param codes: for each change its place in each of the lists.
    :param texts: the lists, equally long.
    """

    codes: Numbers
    texts: Sequence[pa.Array]


#: A template that has none.
NOTHING_CODED = CodedTexts(np.empty(0, np.int64), ())


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Which documents there are, an entry each.

    :param rows: the changes that they are of.
    :param op: their letters; 0: there is no document.
    :param choice: what stands for the row before (`json_kernel.BEFORE_CHOICE`) and after: 0 null, else the
        row of `wanted`, from 1.
    """

    rows: Numbers
    op: Bytes
    choice: Bytes
    wanted: npt.NDArray[np.bool_]


def write(
    buffer: Bytes,
    plan: Plan,
    template: Template,
    numbers: Numbers,
    columns: ColumnTexts,
    old: Spans,
    current: Spans,
    coded: CodedTexts = NOTHING_CODED,
) -> pa.LargeStringArray:
    """Return the documents of a plan; those that are none are null.

    :param buffer: what the cells point into.
    :param old: cells of the rows before; of no changes at all if there are none.
    :raises TailraceError: `DECODE_FAILED` if a text is not UTF-8.
    """
    texts = joined([text for text, _ in template])
    coded_texts, coded_at = _laid_out(coded.texts)
    coded_each = len(coded.texts[0]) if coded.texts else 0
    arguments = (
        plan.rows, plan.op, numbers, *texts, np.array([slot for _, slot in template], np.int64),
        plan.choice, plan.wanted, *joined(columns.names), np.array(columns.styles, np.int64),
        *joined(columns.unavailable), *joined(columns.absent),
        *old.arrays, *current.arrays, coded.codes, coded_each, coded_texts, coded_at,
        np.empty(max(_longest(current), _longest(old)) + 1, np.uint8),
    )  # fmt: skip
    size = (len(texts[0]) + 160 + 2 * sum(map(len, columns.names))) * int(np.count_nonzero(plan.op))
    size += len(coded_texts) // max(coded_each, 1) * int(np.count_nonzero(plan.op))
    size += int(current.length.sum(dtype=np.int64) + old.length.sum(dtype=np.int64)) * 5 // 4
    there = plan.op != 0
    return _array(json_kernel.write_documents, buffer, arguments, len(plan.rows), size, there)


def render(cells: Cells, style: int) -> pa.LargeStringArray:
    """Return the values of one column in a style of JSON, each a JSON text; null for what is no text.

    :raises TailraceError: `DECODE_FAILED` if a text is not UTF-8.
    """
    scratch = np.empty(int(cells.length.max(initial=0)) + 1, np.uint8)
    arguments = (cells.start, cells.length, cells.kind, style, scratch)
    size = cells.size * 5 // 4 + 8 * len(cells)
    there = cells.kind == TEXT
    return _array(json_kernel.write_values, cells.buffer, arguments, len(cells), size, there)


def objects(constants: Sequence[str], texts: Sequence[pa.Array], count: int) -> pa.LargeStringArray:
    """Return for each row the constants with the row's texts between them; no text is null.

    :param texts: lists of texts, UTF-8, one fewer than there are constants; each of `count`.
    """
    laid_out, fixed = _laid_out(texts), joined(constants)
    ends = np.zeros(count + 1, np.int64)
    out = np.empty(int(laid_out[1][-1] - laid_out[1][0]) + count * len(fixed[0]) + _SPARE_BYTES, np.uint8)
    json_kernel.write_objects(*laid_out, *fixed, ends[1:], out)
    return pa.LargeStringArray.from_buffers(count, pa.py_buffer(ends), pa.py_buffer(out))


def joined(texts: Sequence[str]) -> tuple[Bytes, Numbers]:
    """Return texts laid end to end, and where each begins (with the end of the last)."""
    encoded = [text.encode() for text in texts]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    return np.frombuffer(b"".join(encoded), np.uint8), ends


def _laid_out(lists: Sequence[pa.Array]) -> tuple[Bytes, Numbers]:
    # As `joined`, of lists of texts one after the other.
    if not lists:
        return joined(())
    return text_buffers(pa.concat_arrays([texts.cast(pa.large_string()) for texts in lists]))


def _array(
    write_some: Callable[..., Any],
    buffer: Bytes,
    arguments: tuple[Any, ...],
    count: int,
    size: int,
    there: npt.NDArray[np.bool_],
) -> pa.LargeStringArray:
    # The writer stops before a document for which there may be no room; another chunk takes it.
    ends = np.empty(count, np.int64)
    chunks: list[Bytes] = []
    first, done, need = 0, 0, 0
    while first < count:
        out = np.empty(max(size, need, _CHUNK_BYTES_MIN), np.uint8)
        after, used, need = write_some(buffer, first, *arguments, out, ends)
        ends[first:after] += done
        chunks.append(out[:used])
        first, done, size = after, done + used, max(size - used, 0)
    text = chunks[0] if len(chunks) == 1 else np.concatenate([np.empty(0, np.uint8), *chunks])
    offsets = np.concatenate((np.zeros(1, np.int64), ends))
    buffers = pa.py_buffer(offsets), pa.py_buffer(text)
    array = pa.LargeStringArray.from_buffers(count, *buffers, bit_map(there))
    if text.max(initial=0) >= 0x80:
        require_utf8(array)
    return array


def _longest(spans: Spans) -> int:
    return int(spans.length.max(initial=0))
