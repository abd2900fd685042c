"""Arrow's arrays put together from others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.protocol.frames import Numbers


def replaced(array: pa.Array, rows: Numbers, others: pa.Array) -> pa.Array:
    """Return values, those in `rows` (rising) replaced."""
    others = others.cast(array.type)
    if pa.types.is_nested(array.type):  # which `replace_with_mask` does not take
        places = np.arange(len(array))
        places[rows] = len(array) + np.arange(len(rows))
        return pa.concat_arrays([array, others]).take(pa.array(places))
    mask = np.zeros(len(array), np.bool_)
    mask[rows] = True
    return pc.replace_with_mask(array, pa.array(mask), others)


def end_to_end(arrays: Sequence[pa.Array]) -> pa.Array:
    """Return arrays laid end to end; structs get the fields of all.

    :raises pyarrow.ArrowTypeError: if no type holds the values of all.
    :raises pyarrow.ArrowInvalid: if the one that would does not hold a value.
    """
    if len({array.type for array in arrays}) > 1:
        columns = [pa.schema([("values", array.type)]) for array in arrays]
        shared = pa.unify_schemas(columns, promote_options="permissive").field(0).type
        arrays = [array.cast(shared) for array in arrays]
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)
