"""Sets of GTIDs, compared with sets of numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import Kind, TailraceError
from tailrace.sources.vitess.resharding.gtid_sets import FLAVOR, GtidSet

ONE, TWO = "6a60d315-8e10-11eb-b894-04ed332e05c2", "629442b7-8e10-11eb-a0bb-04ed332e05c2"

_SETS = st.dictionaries(st.sampled_from([ONE, TWO, f"{ONE}:tag"]), st.sets(st.integers(1, 12), min_size=1))


def _of(numbers: dict[str, set[int]]) -> GtidSet:
    parts = [f"{server}:{':'.join(map(str, sorted(found)))}" for server, found in numbers.items()]
    return GtidSet.parse(FLAVOR + ",".join(parts))


def _ids(found: GtidSet) -> set[tuple[str, int]]:
    return {
        (server, number)
        for server, intervals in found.intervals.items()
        for first, last in intervals
        for number in range(first, last + 1)
    }


@given(_SETS, _SETS)
def test_sets_behave_as_sets_of_ids(one: dict[str, set[int]], other: dict[str, set[int]]) -> None:
    first, second = _of(one), _of(other)
    assert first.contains(second) == (_ids(first) >= _ids(second))
    assert _ids(first.intersection(second)) == _ids(first) & _ids(second)
    assert GtidSet.parse(str(first)) == first


def test_text_of_vitess_and_of_mysql_is_read() -> None:
    text = f"MySQL56/{ONE}:1-77:80,\n{TWO.upper()}:5:1-4:tagged:1-3"
    assert str(GtidSet.parse(text)) == f"MySQL56/{TWO}:1-5,{TWO}:tagged:1-3,{ONE}:1-77:80"
    assert GtidSet.parse(f"{ONE}:1-3").contains(GtidSet.parse(f"MySQL56/{ONE}:2"))
    assert GtidSet.parse("").intervals == {}


@pytest.mark.parametrize("text", ["FilePos/binlog.000001:4", "MariaDB/0-1-45"])
def test_positions_of_another_kind_are_refused_by_name(text: str) -> None:
    with pytest.raises(TailraceError) as found:
        GtidSet.parse(text)
    assert found.value.kind is Kind.SOURCE_MISCONFIGURED
    assert text.split("/", maxsplit=1)[0] in str(found.value)


@pytest.mark.parametrize(
    "text", ["current", ONE, f"{ONE}:", f"{ONE}:0", f"{ONE}:5-3", f"{ONE}:1-2;{TWO}:1", "x:1"]
)
def test_an_invalid_set_is_refused(text: str) -> None:
    with pytest.raises(TailraceError) as found:
        GtidSet.parse(text)
    assert found.value.kind is Kind.PROTOCOL_VIOLATION
