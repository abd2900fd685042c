"""Checks that a transformation, a predicate or a converter keeps its contract.

Call them in your tests, as those of `conformance`; they raise `AssertionError` with the broken rule.

    from tailrace.testing import stages

    def test_my_converter():
        stages.check_converter(lambda: MyConverter(indent=2))
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.converters.contract import Converter, KeysFirst
from tailrace.converters.factory import Converting
from tailrace.errors import Kind, TailraceError
from tailrace.records.events import Converted
from tailrace.records.group import Group
from tailrace.records.values import python_values
from tailrace.testing.contexts import require
from tailrace.testing.source import lines
from tailrace.transforms.chain import close_of
from tailrace.transforms.contract import Predicate, RecordTransformation, Transformation
from tailrace.transforms.factory import build

#: Number of lines of the default group.
LINES = 40
THREADS = 4

#: The results for records, by their places.
_Outcome = dict[int, Any]


def check_transformation(
    make: Callable[[], Transformation | RecordTransformation], groups: Sequence[Group] = ()
) -> None:
    """Check a transformation, of groups or of single records.

    :param make: returns a new, equal transformation each time.
    :param groups: its input; default: the lines of a `LinesSource`.
    """
    made = make()
    require(
        isinstance(made, Transformation | RecordTransformation),
        "a transformation has apply or apply_record",
    )

    def outcome(transformation: Any, group: Group) -> _Outcome:
        try:
            found = build([transformation]).apply(group)
        except TailraceError as error:
            require(error.kind is not Kind.TASK_FAILED, f"{error.message}: {error.hint}")
            raise
        return {
            int(place): (part.topic, row)
            for part in found
            for place, row in zip(part.index, python_values(part.columns.to_struct_array()), strict=True)
        }

    _check_pure(made, outcome, groups)
    close_of(made)()


def check_predicate(make: Callable[[], Predicate], groups: Sequence[Group] = ()) -> None:
    """Check a predicate; parameters as `check_transformation`."""
    made = make()
    require(isinstance(made, Predicate), "a predicate has matches")

    def outcome(predicate: Any, group: Group) -> _Outcome:
        flags = predicate.matches(group)
        require(
            isinstance(flags, np.ndarray) and flags.shape == (len(group),) and flags.dtype == np.bool_,
            "matches returns an array of booleans, one for each record",
        )
        return dict(zip(group.index.tolist(), flags.tolist(), strict=True))

    _check_pure(made, outcome, groups)


def check_converter(make: Callable[[], Converter], groups: Sequence[Group] = ()) -> None:
    """Check a converter; parameters as `check_transformation`."""
    made = make()
    require(isinstance(made, Converter), "a converter has convert and close")

    def outcome(converter: Any, group: Group) -> _Outcome:
        try:
            found = Converting(converter)(group)
        except TailraceError as error:
            require(error.kind is not Kind.CONVERSION_FAILED, f"{error.message}: {error.hint}")
            raise
        if isinstance(converter, KeysFirst):
            keys, rows = converter.keys(group)
            same = _listed(keys, len(found)) == _listed(found.keys, len(found))
            require(same and _rows(rows, group) == _rows(found.rows, group), "keys are those of convert")
        return _events(found, group)

    _check_pure(made, outcome, groups)
    made.close()


def _events(found: Converted, group: Group) -> _Outcome:
    out: _Outcome = {int(place): [] for place in group.index}
    parts = zip(
        _rows(found.rows, group),
        _listed(found.keys, len(found)),
        _listed(found.values, len(found)),
        _listed(found.headers, len(found)),
        strict=True,
    )
    for row, *event in parts:
        out[int(group.index[row])].append(event)
    return out


def _rows(rows: Any, group: Group) -> list[int]:
    return list(range(len(group))) if rows is None else rows.tolist()


def _listed(values: Any, count: int) -> list[Any]:
    if values is None:
        return [None] * count
    return python_values(values) if isinstance(values, pa.Array) else list(values)


def _check_pure(made: Any, outcome: Callable[[Any, Group], _Outcome], groups: Sequence[Group]) -> None:
    """Check that the result for a record depends only on the record, not on the call, copy or thread."""
    try:
        copy = pickle.loads(pickle.dumps(made))  # noqa: S301 - it was pickled in this line
    except Exception as error:
        raise AssertionError(f"contract broken: it pickles ({type(error).__name__} was raised)") from error
    for group in groups or lines("conformance", 0, LINES).groups:
        whole = outcome(made, group)
        require(whole == outcome(made, group), "a second call gives the same: nothing is kept from the first")
        require(whole == outcome(copy, group), "a copy that was pickled gives the same")
        halves = (group.slice(0, len(group) // 2), group.slice(len(group) // 2, len(group)))
        require(
            whole == _together(outcome(made, half) for half in halves if len(half)),
            "the result for a record does not depend on the others of its group",
        )
        with ThreadPoolExecutor(THREADS) as threads:
            found = list(threads.map(lambda part: outcome(made, part), [group] * THREADS))
        require(all(whole == each for each in found), "several threads may call it at once")


def _together(parts: Iterable[_Outcome]) -> _Outcome:
    found: _Outcome = {}
    for part in parts:
        found |= part
    return found
