"""Key ranges of shards, compared with keyspace ids."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import Kind, TailraceError
from tailrace.sources.vitess.resharding.key_ranges import KeyRange, by_keys, merged, overlapping, uncovered
from tests.support.vitess.model import has_key

_BOUNDS = st.lists(st.binary(min_size=1, max_size=2), max_size=6)
_IDS = [bytes([first, second]) for first in range(0, 256, 5) for second in (0, 1, 128, 255)]


@st.composite
def _ranges(draw: st.DrawFn) -> list[KeyRange]:
    found = []
    for one, other in zip(draw(_BOUNDS), draw(_BOUNDS), strict=False):
        start, end = sorted((one.rstrip(b"\0"), other.rstrip(b"\0")))
        found.append(KeyRange(start, end if draw(st.booleans()) and start < end else None))
    return found


@pytest.mark.parametrize(
    ("shard", "expected"),
    [
        ("0", KeyRange()),
        ("-", KeyRange()),
        ("main", KeyRange()),
        ("-80", KeyRange(b"", b"\x80")),
        ("80-", KeyRange(b"\x80")),
        ("80-C0", KeyRange(b"\x80", b"\xc0")),
        ("8000-c000", KeyRange(b"\x80", b"\xc0")),
        ("4080-40c0", KeyRange(b"\x40\x80", b"\x40\xc0")),
    ],
)
def test_a_shards_name_is_its_key_range(shard: str, expected: KeyRange) -> None:
    assert KeyRange.of_shard(shard) == expected


@pytest.mark.parametrize("shard", ["80-30", "80-80", "8-c", "g0-", "-00", "40-80-c0"])
def test_an_invalid_key_range_is_refused(shard: str) -> None:
    with pytest.raises(TailraceError) as found:
        KeyRange.of_shard(shard)
    assert found.value.kind is Kind.PROTOCOL_VIOLATION
    assert shard in str(found.value)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("-80", "80-", False),
        ("-80", "40-c0", True),
        ("0", "-", True),
        ("80-", "c0-", True),
        ("-40", "40-80", False),
    ],
)
def test_ranges_overlap_where_they_share_a_key(one: str, other: str, expected: bool) -> None:
    assert KeyRange.of_shard(one).overlaps(KeyRange.of_shard(other)) is expected
    assert (overlapping(one, [other]) == (other,)) is expected


@given(_ranges())
def test_merged_ranges_have_the_same_keys_and_do_not_touch(ranges: list[KeyRange]) -> None:
    found = merged(ranges)
    for keyspace_id in _IDS:
        held = any(has_key(part, keyspace_id) for part in ranges)
        assert held == any(has_key(part, keyspace_id) for part in found)
    for before, after in itertools.pairwise(found):
        assert before.end is not None
        assert before.end < after.start


@given(_ranges(), _ranges())
def test_uncovered_returns_the_keys_of_no_range(ranges: list[KeyRange], wanted: list[KeyRange]) -> None:
    for whole in (*wanted, KeyRange()):
        gaps = uncovered(whole, ranges)
        for keyspace_id in _IDS:
            held = any(has_key(part, keyspace_id) for part in ranges)
            missing = has_key(whole, keyspace_id) and not held
            assert missing == any(has_key(gap, keyspace_id) for gap in gaps)


def test_shards_are_ordered_by_their_keys() -> None:
    assert by_keys(["80-", "-40", "40-80"]) == ["-40", "40-80", "80-"]
    assert [str(part) for part in uncovered(KeyRange(), [KeyRange.of_shard("40-80")])] == ["-40", "80-"]
    assert [str(part) for part in merged(map(KeyRange.of_shard, ["-40", "80-", "40-80"]))] == ["-"]
