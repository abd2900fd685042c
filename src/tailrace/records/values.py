"""Arrow's values as Python's own, a column at a time. What Python's type can't hold is PostgreSQL's text.

`to_pylist` makes a timestamp, a decimal or a struct value by value, which is most of what reading a record
costs.
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

from tailrace.sources.postgres.decode.values.stamps import stamp_texts

_EPOCH = dt.date(1970, 1, 1).toordinal()
_DAYS_MIN, _DAYS_MAX = dt.date.min.toordinal() - _EPOCH, dt.date.max.toordinal() - _EPOCH
_PER_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000}

#: Rows with more columns are made by `dict(zip(…))`, which is as quick then.
_COLUMNS_COMPILED_MAX = 32

# The product with a power of ten is exact: more digits than decimal128 has. A context apart: a handler may
# have set another precision for its own thread.
_EXACT = Context(prec=80)


def python_values(array: pa.Array) -> list[Any]:
    """Return the values as `to_pylist` does; dates and timestamps before year 1 or after 9999, and infinite
    ones, as texts.
    """
    kind = array.type
    if pa.types.is_struct(kind):
        parts = [python_values(array.field(place)) for place in range(kind.num_fields)]
        rows = _dicts_of(tuple(field.name for field in kind))(zip(*parts, strict=True))
        return _with_nulls(rows or [{} for _ in range(len(array))], array)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        items = python_values(array.flatten())
        ends = np.cumsum(pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)).tolist()
        return _with_nulls([items[a:b] for a, b in zip([0, *ends], ends, strict=False)], array)
    if pa.types.is_decimal128(kind) and kind.scale >= 0:
        return _decimals(array)
    if pa.types.is_date(kind) or (pa.types.is_timestamp(kind) and kind.unit in _PER_DAY):
        return _stamps(array)
    found: list[Any] = array.to_pylist()
    return found


@functools.lru_cache(maxsize=256)
def _dicts_of(names: tuple[str, ...]) -> Callable[[Iterable[tuple[Any, ...]]], list[Any]]:
    # Returns what makes rows dictionaries. A display of constant keys takes a third of `dict(zip(…))`; that
    # needs code for these names.
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


def _stamps(array: pa.Array) -> list[Any]:
    first, last = _DAYS_MIN, _DAYS_MAX
    if pa.types.is_date(array.type):
        array = array.cast(pa.date32())
        numbers = array.cast(pa.int32())
    else:
        numbers = array.cast(pa.int64())
        if array.type.tz not in {None, "UTC"}:
            first, last = first + 1, last - 1  # as another zone's clock shows it
        first, last = first * _PER_DAY[array.type.unit], (last + 1) * _PER_DAY[array.type.unit] - 1
    bounds = pc.min_max(numbers).as_py()
    if bounds["min"] is None or (bounds["min"] >= first and bounds["max"] <= last):
        return _inside(array)
    odd = pc.fill_null(pc.or_(pc.less(numbers, first), pc.greater(numbers, last)), False)
    found: list[Any] = pc.if_else(odd, pa.scalar(None, array.type), array).to_pylist()
    texts = stamp_texts(array.filter(odd)).to_pylist()
    for place, text in zip(np.flatnonzero(odd.to_numpy(zero_copy_only=False)).tolist(), texts, strict=True):
        found[place] = text
    return found


def _inside(array: pa.Array) -> list[Any]:
    if array.type != pa.timestamp("us") and array.type != pa.timestamp("us", "UTC"):
        found: list[Any] = array.to_pylist()
        return found
    # numpy makes moments without a time zone in one go, and what is added to one that has a zone: a tenth of
    # what giving each its zone takes.
    plain = array.cast(pa.timestamp("us")).to_numpy(zero_copy_only=False)
    if array.type.tz is None:
        return list(plain.astype(object))
    epoch = pa.scalar(0, array.type).as_py()  # with the very zone that pyarrow gives
    since: list[Any] = (plain - np.datetime64(0, "us")).astype(object).tolist()
    return [None if each is None else epoch + each for each in since]


def with_specials(values: list[Any], name: str, special: pa.Array, after: pa.Array) -> list[Any]:
    """Put the texts of values that their columns don't hold into the dicts of a column of records.

    :param values: of the column `name`: `key`, `before`, `after` or `value`.
    :param special: the records' column `special`; of a key it names the row's column: that after the change,
        or before a delete.
    """
    if not pa.types.is_map(special.type) or special.null_count == len(special):
        return values
    for row in np.flatnonzero(special.is_valid().to_numpy(zero_copy_only=False)).tolist():
        held = values[row]
        for path, text in special[row].as_py() if isinstance(held, dict) else ():
            place, dot, column = path.partition(".")
            meant = place == name or (
                name == "key"
                and (not dot or place == "after" or (place == "before" and not after[row].is_valid))
            )
            if meant and (column or path) in held:
                held[column or path] = text
    return values
