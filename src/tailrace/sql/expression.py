"""An expression, ready to be computed over many columns: read once, pickled as its text."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.sql.computing import Rows, chosen_rows, computed, require_patterns, truth
from tailrace.sql.kinds import KindError
from tailrace.sql.parsing import parse
from tailrace.sql.tokens import ExpressionError


class Expression:
    """An expression over rows whose columns begin with one of some names.

    :raises ExpressionError: if `text` can't be read, or begins a path with another name.
    """

    def __init__(self, text: str, roots: tuple[str, ...]) -> None:
        self.text = text
        self._roots = roots
        self._node = parse(text, roots)
        require_patterns(self._node, text)

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"

    def __reduce__(self) -> tuple[type[Expression], tuple[str, tuple[str, ...]]]:
        return Expression, (self.text, self._roots)

    def values(self, rows: Rows) -> pa.Array:
        """Return the value for each row.

        :raises ExpressionError: if the expression does not fit the columns, or a value its type.
        """
        return computed(self._node, self.text, rows)

    def truths(self, rows: Rows) -> pa.Array:
        """Return for each row true, false or null.

        :raises ExpressionError: as `values`, and if the values are something else.
        """
        found = self.values(rows)
        try:
            return truth(found)
        except KindError as error:
            raise ExpressionError(str(error), self.text, self._node.at) from None

    def chosen(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return which rows are true; null is not.

        :raises ExpressionError: as `truths`.
        """
        return chosen_rows(self.truths(rows))
