"""Converts Arrow columns to Python objects. A value that Python's type can't hold becomes PostgreSQL's text.

`to_pylist` creates timestamps, decimals and structs value by value, which would be most of the cost of
reading a record.
"""

from __future__ import annotations

import datetime as dt
import functools
import itertools
from collections.abc import Callable, Iterable
from decimal import Context, Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.decode.values.stamps import microseconds, stamp_texts

_EPOCH = dt.date(1970, 1, 1).toordinal()
_DAYS_MIN, _DAYS_MAX = dt.date.min.toordinal() - _EPOCH, dt.date.max.toordinal() - _EPOCH
_PER_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000}

#: Largest number of columns for which code is compiled; for more, `dict(zip(…))` is as fast.
_COLUMNS_COMPILED_MAX = 32

# Has more digits than decimal128, so that the product with a power of ten is exact. A separate context,
# because a handler may set another precision for its thread.
_EXACT = Context(prec=80)


def python_values(array: pa.Array) -> list[Any]:
    """Return the values as `to_pylist` does, but with texts for infinite dates and timestamps, and for those
    before year 1 or after year 9999.
    """
    read = _READERS.get(array.type.id, _as_arrow_gives)
    return read(array)


def _as_arrow_gives(array: pa.Array) -> list[Any]:
    found: list[Any] = array.to_pylist()
    return found


def _structs(array: pa.StructArray) -> list[Any]:
    kind = array.type
    parts = [python_values(array.field(place)) for place in range(kind.num_fields)]
    rows = _dicts_of(tuple(kind.names))(zip(*parts, strict=True))
    return _with_nulls(rows or [{} for _ in range(len(array))], array)


def _lists(array: pa.ListArray) -> list[Any]:
    items = python_values(array.flatten())
    ends = np.cumsum(pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)).tolist()
    return _with_nulls([items[a:b] for a, b in zip([0, *ends], ends, strict=False)], array)


@functools.lru_cache(maxsize=256)
def _dicts_of(names: tuple[str, ...]) -> Callable[[Iterable[tuple[Any, ...]]], list[Any]]:
    # Returns a function that converts rows to dictionaries. A dict display with constant keys takes a third
    # of the time of `dict(zip(…))`, but needs code that is compiled for these names.
    if not 0 < len(names) <= _COLUMNS_COMPILED_MAX:
        return lambda rows: [dict(zip(names, row, strict=False)) for row in rows]
    values = [f"v{place}" for place in range(len(names))]
    pairs = ", ".join(f"{name!r}: {value}" for name, value in zip(names, values, strict=True))
    code = f"lambda rows: [{{{pairs}}} for {', '.join(values)}, in rows]"
    made: Callable[[Iterable[tuple[Any, ...]]], list[Any]] = eval(code, {})  # noqa: S307 - literals alone
    return made


def _decimals(array: pa.Array) -> list[Any]:
    if not len(array):
        return []
    if array.type.scale < 0:
        return _as_arrow_gives(array)
    low, high = np.frombuffer(array.buffers()[1], np.int64).reshape(-1, 2)[array.offset :][: len(array)].T
    if array.null_count or (high != low >> 63).any():
        return [None if text is None else Decimal(text) for text in array.cast(pa.string()).to_pylist()]
    unit = Decimal((0, (1,), -array.type.scale))
    return list(map(_EXACT.multiply, low.tolist(), itertools.repeat(unit)))


def _with_nulls(values: list[Any], array: pa.Array) -> list[Any]:
    if array.null_count == 0:
        return values
    there = array.is_valid().to_numpy(zero_copy_only=False).tolist()
    return [value if is_there else None for value, is_there in zip(values, there, strict=True)]


def _dates(array: pa.Array) -> list[Any]:
    array = array.cast(pa.date32())
    if _lies_within(array.cast(pa.int32()), _DAYS_MIN, _DAYS_MAX):
        return _as_arrow_gives(array)
    return _with_texts(array, array.cast(pa.int32()), _DAYS_MIN, _DAYS_MAX)


def _stamps(array: pa.Array) -> list[Any]:
    kind = array.type
    if kind.unit == "ns":  # a datetime has whole microseconds
        nulls = array.is_null().to_numpy(zero_copy_only=False)
        return _inside(pa.array(microseconds(array), pa.timestamp("us", kind.tz), mask=nulls))
    # In other time zones the local time may be out of Python's range: the bounds are a day narrower.
    less = kind.tz not in {None, "UTC"}
    first, last = (_DAYS_MIN + less) * _PER_DAY[kind.unit], (_DAYS_MAX + 1 - less) * _PER_DAY[kind.unit] - 1
    numbers = array.view(pa.int64())
    return _inside(array) if _lies_within(numbers, first, last) else _with_texts(array, numbers, first, last)


def _lies_within(numbers: pa.Array, first: int, last: int) -> bool:
    if numbers.null_count == len(numbers):
        return True
    if numbers.null_count:
        numbers = numbers.drop_null()
    found = numbers.to_numpy()
    return bool(first <= found.min() and found.max() <= last)


def _with_texts(array: pa.Array, numbers: pa.Array, first: int, last: int) -> list[Any]:
    odd = pc.fill_null(pc.or_(pc.less(numbers, first), pc.greater(numbers, last)), False)
    found: list[Any] = pc.if_else(odd, pa.scalar(None, array.type), array).to_pylist()
    texts = stamp_texts(array.filter(odd)).to_pylist()
    for place, text in zip(np.flatnonzero(odd.to_numpy(zero_copy_only=False)).tolist(), texts, strict=True):
        found[place] = text
    return found


def _inside(array: pa.Array) -> list[Any]:
    if array.type.unit != "us" or array.type.tz not in {None, "UTC"}:
        return _as_arrow_gives(array)
    # numpy converts timestamps without a time zone in one call, and time deltas, which are added to a
    # timestamp with a time zone: a tenth of the time of setting the zone of each value.
    plain = array.view(pa.timestamp("us")).to_numpy(zero_copy_only=False)
    if array.type.tz is None:
        return list(plain.astype(object))
    epoch = pa.scalar(0, array.type).as_py()  # has the same tzinfo that pyarrow returns
    since: list[Any] = (plain - np.datetime64(0, "us")).astype(object).tolist()
    if array.null_count == 0:
        return list(map(epoch.__add__, since))
    return [None if each is None else epoch + each for each in since]


#: Readers by the id of the Arrow type.
_READERS: dict[int, Callable[[pa.Array], list[Any]]] = {
    pa.struct([]).id: _structs,
    pa.list_(pa.null()).id: _lists,
    pa.large_list(pa.null()).id: _lists,
    pa.decimal128(1).id: _decimals,
    pa.date32().id: _dates,
    pa.date64().id: _dates,
    pa.timestamp("us").id: _stamps,
}


def with_specials(values: list[Any], name: str, special: pa.Array) -> list[Any]:
    """Put the texts of values that their columns can't hold into the dicts of a column, and return these.

    :param values: of the column `name`: `key`, `before`, `after` or `value`.
    :param special: the records' column `special`.
    """
    if not pa.types.is_map(special.type) or special.null_count == len(special):
        return values
    for row in np.flatnonzero(special.is_valid().to_numpy(zero_copy_only=False)).tolist():
        held = values[row]
        for path, text in special[row].as_py() if isinstance(held, dict) else ():
            place, _, column = path.partition(".")
            if place == name and column in held:
                held[column] = text
    return values
