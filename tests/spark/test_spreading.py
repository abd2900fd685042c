"""Which records go to one task: all of an ordering key, in order, and nothing across a record that has
all."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tailrace.engine.processing.ordering_keys import OrderingKeys
from tailrace.engine.processing.stage import StagedGroup
from tailrace.records.group import Group
from tailrace.spark.processing.partitions import spread

RECORDS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 5), st.integers(0, 5), st.integers(0, 9)), max_size=30
)
Stand = tuple[int, int, bool]


def staged(records: list[tuple[int, int, int, int]]) -> tuple[list[StagedGroup], dict[int, Stand]]:
    """Two groups; a record stands in keys `own` and, one in three, `other`; one in ten in all."""
    stands = {
        place: (own, other if chance % 3 == 0 else own, chance == 9)
        for place, (_, own, other, chance) in enumerate(records)
    }
    groups = []
    for number in (0, 1):
        places = [place for place, record in enumerate(records) if record[0] == number]
        own, other, in_all = (
            zip(*(stands[place] for place in places), strict=True) if places else ((), (), ())
        )
        keys = OrderingKeys(
            np.array(own, np.uint64), np.array(other, np.uint64), np.array(in_all, np.bool_), pa.int64()
        )
        columns = pa.RecordBatch.from_pydict({"op": pa.array(["c"] * len(places))})
        group = Group.of_columns(str(number), np.array(places, np.int64), columns)
        groups.append(StagedGroup(group, None, keys))
    return [one for one in groups if len(one.group)], stands


@given(st.lists(RECORDS, max_size=3), st.integers(1, 4))
def test_an_ordering_key_is_in_one_task_of_a_step_and_steps_end_at_walls(
    listed: list[list[tuple[int, int, int, int]]], width: int
) -> None:
    batches = [staged(records) for records in listed]
    found: list[tuple[int, int]] = []
    for step in spread([groups for groups, _ in batches], width):
        assert 0 < len(step) <= width
        task_of: dict[int, int] = {}
        in_step: list[tuple[int, int]] = []
        for task, load in enumerate(step):
            assert [share.batch for share in load] == sorted({share.batch for share in load})
            for share in load:
                for one in share.staged:
                    assert one.keys is not None
                    for place, one_key, tied in zip(
                        one.group.index.tolist(),
                        one.keys.own.tolist(),
                        one.keys.other.tolist(),
                        strict=True,
                    ):
                        assert task_of.setdefault(one_key, task) == task
                        assert task_of.setdefault(tied, task) == task
                        in_step.append((share.batch, place))
        walls = [at for at in in_step if batches[at[0]][1][at[1]][2]]
        assert not walls or in_step == walls
        assert not walls or len(walls) == 1
        assert not found or max(found) < min(in_step)
        found += in_step
    assert sorted(found) == [(n, place) for n, (_, stands) in enumerate(batches) for place in stands]
