"""Values that their typed columns don't hold, found by column in a group's `special`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa


class Specials:
    """Texts of values that their typed columns don't hold, by column."""

    def __init__(self, column: pa.Array) -> None:
        self._rows: dict[str, tuple[npt.NDArray[np.int64], pa.Array]] = {}
        if pa.types.is_null(column.type) or column.null_count == len(column):
            return
        own = column.take(pa.array(np.arange(len(column))))
        names = own.keys.to_numpy(zero_copy_only=False)
        rows = np.repeat(np.arange(len(own)), np.diff(own.offsets.to_numpy()))
        for name in set(names):
            chosen = np.flatnonzero(names == name)
            self._rows[str(name)] = (rows[chosen], own.items.take(pa.array(chosen)))

    def of(self, name: str) -> tuple[npt.NDArray[np.int64], pa.Array] | None:
        """Return rows (rising) and texts of a column; None if all is held."""
        return self._rows.get(name)
