"""The copy of a shard by one stream, whose tablet vtgate may change by itself: which positions show that."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

import pytest

from tailrace.errors import TailraceError
from tailrace.sources.vitess.connection import vstream_pb2 as pb
from tailrace.sources.vitess.resharding.events import EndReason
from tailrace.sources.vitess.rows.copy_keys import key_before
from tailrace.sources.vitess.streaming.one_stream_copies import OneStreamCopy
from tests.support.vitess import messages as ms

Position = tuple[str, Mapping[str, int]]  # after a transaction, and the last key of each table that is named

#: Apples, bananas and cherries are copied, one table after the other.
_FIRST: tuple[Position, ...] = (("1", {}), ("1", {"apples": 1}), ("1", {"apples": 2}), ("1", {}))
#: Apples were copied before, and half of the bananas.
_AGAIN: tuple[Position, ...] = (
    ("5", {"apples": 2, "bananas": 1}),
    ("6", {"apples": 2, "bananas": 1}),
    ("6", {"bananas": 1}),
)
_NAMED = frozenset({"apples", "bananas"})
_NONE: frozenset[str] = frozenset()
_ENDED = EndReason.INTERRUPTED


def _response(position: Position) -> bytes:
    gtid, named = position
    tables = [pb.TableLastPk.FromString(base64.b64decode(key_before(*each))) for each in _keys(named)]
    return ms.copied(gtid=gtid, tables=tables)


def _keys(named: Mapping[str, int]) -> list[tuple[str, str, int]]:
    return [(table, "id", value) for table, value in named.items()]


@pytest.mark.parametrize(
    ("named", "positions", "left", "reason"),
    [
        # Changes between tables, and within none: a copy as it should be.
        (_NONE, (*_FIRST, ("2", {}), ("3", {}), ("3", {"cherries": 7}), ("3", {})), 8, None),
        (_NAMED, (*_AGAIN, ("7", {"bananas": 1}), ("7", {"bananas": 9}), ("7", {}), ("8", {})), 7, None),
        # Another tablet goes on amid a table: changes come first, or at once a table that was finished.
        (_NONE, (*_FIRST[:2], ("2", {"apples": 1})), 2, _ENDED),
        (_NAMED, (*_AGAIN, ("7", {"bananas": 9}), ("8", {"bananas": 9})), 4, _ENDED),
        (_NAMED, (*_AGAIN, ("6", {"bananas": 9}), ("6", {"bananas": 9, "apples": 1})), 4, _ENDED),
        (_NAMED, (*_AGAIN, ("6", {"bananas": 1, "apples": 1})), 3, _ENDED),
        # Between two tables: there may have been changes of the finished one since.
        (_NAMED, (*_AGAIN, ("7", {"bananas": 1}), ("7", {"bananas": 1, "apples": 1})), 4, EndReason.UNSENT),
    ],
)
@pytest.mark.parametrize("size", [1, 9])
def test_a_stream_is_left_where_another_tablet_goes_on(
    named: frozenset[str], positions: Sequence[Position], left: int, reason: EndReason | None, size: int
) -> None:
    copy = OneStreamCopy(ms.SHARD, 1, 0, named)
    responses = list(map(_response, positions))
    found: list[bytes] = []
    for at in range(0, len(responses), size):
        if copy.broken_off is None:
            found += copy.left_of(responses[at : at + size])
    assert found == responses[:left]
    assert copy.broken_off is reason
    if reason is not None:
        with pytest.raises(TailraceError, match="inside a transaction"):
            copy.left_of(responses)
