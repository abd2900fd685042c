"""What the tests of Debezium's connector require of many tasks, required of ours: `VitessConnectorTest` and
`VitessConnectorTaskTest`. The page on Vitess has a table of them.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from tailrace.errors import Kind, TailraceError
from tailrace.sources.vitess.resharding.coordinator import Coordinator
from tailrace.sources.vitess.resharding.events import OpenStream, PositionReached, ShardsListed
from tailrace.sources.vitess.resharding.gtid_sets import CURRENT, TO_COPY
from tailrace.sources.vitess.resharding.shard_state import Begun, CopyState, ShardState
from tailrace.sources.vitess.resharding.transitions import ShardMode

QUARTERS = ("-4000", "4000-8000", "8000-c000", "c000-")
_SERVER = "6a60d315-8e10-11eb-b894-04ed332e05c2"
_REPOSITORY = Path(__file__).parents[3]


def _gtid(last: int) -> str:
    return f"MySQL56/{_SERVER}:1-{last}"


def _started(states: dict[str, ShardState], tasks: int, *listed: str, copies: bool = True) -> Coordinator:
    """Return a coordinator that has the first list of shards, without regard to tasks."""
    found = Coordinator(states, range(tasks), copies=copies)
    found.start()
    found.step(ShardsListed(listed or tuple(states)))
    return found


def _opened(states: dict[str, ShardState], tasks: int, *listed: str) -> dict[str, OpenStream]:
    found = Coordinator(states, range(tasks))
    commands = [*found.start(), *found.step(ShardsListed(listed or tuple(states)))]
    return {command.shard: command for command in commands if isinstance(command, OpenStream)}


@pytest.mark.parametrize("tasks", [1, 2, 4, 8])
@pytest.mark.parametrize("copies", [True, False])
def test_without_offsets_each_shard_begins_as_the_snapshot_mode_says_with_epoch_0(
    tasks: int, copies: bool
) -> None:
    found = _started({}, tasks, *QUARTERS, copies=copies)
    assert {shard.kept.gtid for shard in found.shards.values()} == {TO_COPY if copies else CURRENT}
    assert {shard.kept.epoch for shard in found.shards.values()} == {0}
    read_by = [shard.task for shard in found.shards.values()]
    assert sorted(read_by.count(task) for task in set(read_by)) == [4 // min(tasks, 4)] * min(tasks, 4)


@pytest.mark.parametrize("order", list(itertools.permutations(["-80", "80-90", "90-"])))
def test_the_assignment_of_shards_does_not_depend_on_the_order_of_the_list(order: tuple[str, ...]) -> None:
    found = _started({}, 2, *order)
    assert {name: shard.task for name, shard in found.shards.items()} == {"-80": 0, "80-90": 0, "90-": 1}


@pytest.mark.parametrize(("before", "now"), [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (3, 8), (8, 1)])
def test_each_shard_keeps_its_position_and_epoch_when_the_number_of_tasks_changes(
    before: int, now: int
) -> None:
    first = _started({}, before, *QUARTERS, copies=False)
    for number, name in enumerate(QUARTERS, 1):
        first.step(PositionReached(name, first.shards[name].attempt, _gtid(number)))
    first.step(ShardsListed(QUARTERS))  # confirmed: they serve
    states = {name: ShardState.from_json(shard.kept.as_json()) for name, shard in first.shards.items()}
    states["c000-"] = ShardState(_gtid(4), epoch=3)
    opened = _opened(states, now)
    assert {name: each.positions for name, each in opened.items()} == {
        name: {name: _gtid(number)} for number, name in enumerate(QUARTERS, 1)
    }
    assert Coordinator(states, range(now)).shards["c000-"].kept.epoch == 3


@pytest.mark.parametrize("tasks", [1, 2, 4])
def test_one_shard_without_a_position_begins_and_the_others_continue(tasks: int) -> None:
    states = {name: ShardState(_gtid(7)) for name in QUARTERS}
    states["8000-c000"] = ShardState(TO_COPY, copy=CopyState(), begun=Begun.COPY)
    opened = _opened(states, tasks)
    assert opened.pop("8000-c000").positions == {"8000-c000": TO_COPY}
    assert {each.positions[name] for name, each in opened.items()} == {_gtid(7)}


@pytest.mark.parametrize("tasks", [1, 2, 4])
def test_a_shard_that_was_split_meanwhile_is_read_further_and_its_children_wait_for_its_journal(
    tasks: int,
) -> None:
    states = {name: ShardState(_gtid(7)) for name in QUARTERS}
    opened = _opened(states, tasks, *QUARTERS[:3], "c000-e000", "e000-")
    assert {name: each.positions for name, each in opened.items()} == {
        name: {name: _gtid(7)} for name in QUARTERS
    }


@pytest.mark.parametrize("tasks", [1, 2])
def test_a_split_shard_without_a_position_begins_with_its_children(tasks: int) -> None:
    states = {name: ShardState(_gtid(7)) for name in QUARTERS}
    states["c000-"] = ShardState(TO_COPY, copy=CopyState(), begun=Begun.COPY)
    found = _started(states, tasks, *QUARTERS[:3], "c000-e000", "e000-")
    assert {name: found.shards[name].state for name in ("c000-", "c000-e000", "e000-")} == {
        "c000-": ShardMode.RETIRED,
        "c000-e000": ShardMode.COPYING,
        "e000-": ShardMode.COPYING,
    }
    assert {found.shards[name].kept.gtid for name in QUARTERS[:3]} == {_gtid(7)}


def test_fewer_shards_that_omit_keys_are_refused_and_fewer_with_all_keys_are_a_merge() -> None:
    states = {name: ShardState(_gtid(7)) for name in QUARTERS}
    with pytest.raises(TailraceError, match="none serves 80-") as refused:
        _started(states, 2, *QUARTERS[:2])
    assert refused.value.kind is Kind.PROTOCOL_VIOLATION
    found = _started(states, 2, "-8000", *QUARTERS[2:])
    assert {name: shard.kept.gtid for name, shard in found.shards.items()} == dict.fromkeys(
        QUARTERS, _gtid(7)
    )


def test_a_state_of_a_version_without_copies_is_read() -> None:
    found = ShardState.from_json({"v": 1, "gtid": _gtid(7)})
    assert (found.gtid, found.copy, found.request) == (_gtid(7), None, (_gtid(7), {}))


def test_the_tests_named_on_the_page_exist() -> None:
    page = (_REPOSITORY / "docs" / "vitess.md").read_text()
    named = re.findall(
        r"`(test_\w+)\.py` (`test_\w+`(?:, `test_\w+`)*)", page.partition("Debezium's tests")[2]
    )
    assert len(named) > 10
    for module, tests in named:
        found = "".join(
            path.read_text() for path in (_REPOSITORY / "tests").rglob(f"{module}.py") if "itess" in str(path)
        )
        missing = [name for name in re.findall(r"test_\w+", tests) if f"def {name}(" not in found]
        assert not missing, (module, missing)
