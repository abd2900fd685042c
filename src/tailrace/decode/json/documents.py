"""JSON documents of changes as one Arrow array, written by the kernels of `json_kernel`."""

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

#: Smallest buffer that is allocated for documents, in bytes.
_CHUNK_BYTES_MIN = 1 << 16

#: Unused bytes at the end of a buffer: texts are copied in words of eight bytes.
_SPARE_BYTES = 8


@dataclass(frozen=True, slots=True)
class ColumnTexts:
    """How columns are written: for each column its style, and texts in JSON.

    :param names: names with the quotes and the colon.
    :param unavailable: text in place of a value that was not sent.
    :param absent: text in place of a column that the row does not have; "" leaves the column out.
    """

    names: Sequence[str]
    styles: Sequence[int]
    unavailable: Sequence[str]
    absent: Sequence[str]


@dataclass(frozen=True, slots=True, eq=False)
class CodedTexts:
    """Texts that many changes share; `json_kernel.CODED` refers to a list of them in a template.

    :param codes: for each change, the index of its text in each list.
    :param texts: the lists, all of the same length.
    """

    codes: Numbers
    texts: Sequence[pa.Array]


#: The texts of a template without any.
NOTHING_CODED = CodedTexts(np.empty(0, np.int64), ())


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The documents to write, one entry per document.

    :param rows: index of the document's change.
    :param op: letter of the document's operation; 0: there is no document.
    :param choice: columns of the row before (`json_kernel.BEFORE_CHOICE`) and after: 0 for null, else a
        row of `wanted`, counted from 1.
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
    """Return the documents of a plan; null for an entry without a document.

    :param buffer: the bytes that the cells point into.
    :param old: cells of the rows before; without any changes if no change has such a row.
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
    """Return the values of one column as JSON texts in a style; null for a cell without a text.

    :raises TailraceError: `DECODE_FAILED` if a text is not UTF-8.
    """
    scratch = np.empty(int(cells.length.max(initial=0)) + 1, np.uint8)
    arguments = (cells.start, cells.length, cells.kind, style, scratch)
    size = cells.size * 5 // 4 + 8 * len(cells)
    there = cells.kind == TEXT
    return _array(json_kernel.write_values, cells.buffer, arguments, len(cells), size, there)


def objects(constants: Sequence[str], texts: Sequence[pa.Array], count: int) -> pa.LargeStringArray:
    """Return for each row the constants with the row's texts between them; no result is null.

    :param texts: lists of `count` texts in UTF-8, one list fewer than there are constants.
    """
    laid_out, fixed = _laid_out(texts), joined(constants)
    ends = np.zeros(count + 1, np.int64)
    out = np.empty(int(laid_out[1][-1] - laid_out[1][0]) + count * len(fixed[0]) + _SPARE_BYTES, np.uint8)
    json_kernel.write_objects(*laid_out, *fixed, ends[1:], out)
    return pa.LargeStringArray.from_buffers(count, pa.py_buffer(ends), pa.py_buffer(out))


def joined(texts: Sequence[str]) -> tuple[Bytes, Numbers]:
    """Return the texts concatenated, and the offset of each (and the end of the last)."""
    encoded = [text.encode() for text in texts]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    return np.frombuffer(b"".join(encoded), np.uint8), ends


def _laid_out(lists: Sequence[pa.Array]) -> tuple[Bytes, Numbers]:
    # As `joined`, for several lists of texts, one after the other.
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
    # The kernel stops before a document that may not fit; the next chunk begins with that document.
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
