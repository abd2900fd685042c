"""Plans and ranges compared with a join by brute force: topics grow and are read at random, twice."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pytest

from tailrace.errors import Kind, TailraceError
from tailrace.join import planning as planning_module
from tailrace.join import range_join as range_join_module
from tailrace.join.extraction import MESSAGES, DebeziumJson
from tailrace.join.merge import Position
from tailrace.join.planning import (
    BatchLimits,
    BatchPlan,
    ClusterState,
    Ends,
    PartitionPlan,
    Place,
    Progress,
    SettledTransactions,
    Settling,
    decoded,
    decoded_progress,
    encoded,
    encoded_progress,
    first_plan,
    next_plan,
)
from tailrace.join.range_join import JoinRange, RangeJoin, ranges_of
from tests.support.join.simulated_topics import TRANSACTIONS, SimulatedTopics


def read(topics: SimulatedTopics, wanted: JoinRange, rng: random.Random) -> tuple[pa.Table | None, Progress]:
    """Read a range, a random amount of either topic at a time."""
    join = RangeJoin(wanted, DebeziumJson())
    at = {wanted.place: wanted.position.data, TRANSACTIONS: wanted.position.transactions}
    ends = {wanted.place: wanted.end, TRANSACTIONS: wanted.transactions_end}
    add = {wanted.place: join.add_data, TRANSACTIONS: join.add_transactions}
    found = []
    size = rng.choice([1, 5, 50, 50])
    while not join.is_over(at[wanted.place], at[TRANSACTIONS]):
        place = rng.choice([each for each in at if at[each] < ends[each]])
        messages = topics.messages(place, at[place], rng.randint(1, size))
        if len(messages):
            add[place](messages)
            at[place] = messages.column("offset")[-1].as_py() + 1
        else:
            partition = topics.transactions if place == TRANSACTIONS else topics.data[place]
            at[place] = partition.committed
        found.append(join.take())
    found.append(join.rest())
    batches = [batch for batch in found if batch is not None]
    return (pa.Table.from_batches(batches).combine_chunks() if batches else None), join.progress()


@dataclass
class Query:
    """Reads topics batch by batch, as Spark does."""

    topics: SimulatedTopics
    rng: random.Random
    limits: BatchLimits = field(default_factory=BatchLimits)
    rows: dict[Place, list[dict]] = field(default_factory=lambda: defaultdict(list))
    batches: list[list[dict]] = field(default_factory=list)

    def __post_init__(self) -> None:
        state = self.topics.state()
        self.plan = first_plan("g", state, dict.fromkeys(self.topics.data, 0), 0)
        self.settling, self.progress = Settling(), {}
        self.safe = 0

    def batch(self) -> bool:
        """Plan a batch and read it; return whether there was one."""
        state = self.topics.state(self._something_happens)
        settled = self.settling.look(state)
        progress = {
            place: kept
            for place, each in self.progress.items()
            if (kept := decoded_progress(json.loads(json.dumps(encoded_progress(each)))))
        }
        plan = next_plan(self.plan, state, settled, progress, self.limits, self.safe)
        if plan.ends_as(self.plan):
            return False
        self.safe, self.plan = self.plan.begin, decoded(json.loads(json.dumps(encoded(plan))))
        assert self.plan == plan
        got: list[dict] = []
        for wanted in ranges_of(plan):
            table, progress_ = read(self.topics, wanted, self.rng)
            self._something_happens()
            again, _ = read(self.topics, self._from_elsewhere(wanted), self.rng)
            assert (again is None) == (table is None)
            assert table is None or table.equals(again), (table.to_pylist(), again.to_pylist())
            if self.rng.random() < 0.9:
                self.progress[wanted.place] = progress_
            if table is not None:
                rows = [
                    {**row, "place": wanted.place, "whole": wanted.is_batch_whole}
                    for row in table.to_pylist()
                ]
                self.rows[wanted.place] += rows
                got += rows
        self.batches.append(got)
        if self.rng.random() < 0.1:
            self.settling = Settling()  # a restart
        if self.rng.random() < 0.05:
            self.progress.clear()
        return True

    def _from_elsewhere(self, wanted: JoinRange) -> JoinRange:
        # As if less were known of earlier batches.
        if self.rng.random() < 0.8:
            return wanted
        return replace(wanted, position=Position(0, 0))

    def _something_happens(self) -> None:
        for _ in range(self.rng.choice([0, 0, 1, 4])):
            self.topics.step()


def drained(query: Query) -> None:
    query.topics.settle()
    query.rng, quiet = random.Random(0), query.rng
    query._something_happens = lambda: None  # type: ignore[method-assign]
    for _ in range(10_000):
        if not query.batch():
            break
    query.rng = quiet


CASES = 10
LIMITS = [
    BatchLimits(),
    BatchLimits(),
    BatchLimits(offsets=2),
    BatchLimits(offsets=7),
    BatchLimits(transaction_offsets=1),
    BatchLimits(transaction_offsets=3),
    BatchLimits(5, 2),
]


@pytest.mark.ci
@pytest.mark.parametrize("postgres", [True, False])
def test_each_row_is_in_one_batch_with_its_transaction_however_topics_are_read(postgres, join_seed):
    for number in range(CASES):
        _check_seed(join_seed * 1000 + number, postgres=postgres)


def _check_seed(seed: int, *, postgres: bool) -> None:
    rng = random.Random(seed)
    topics = SimulatedTopics(rng, rng.randint(1, 4), postgres=postgres)
    query = Query(topics, rng, rng.choice(LIMITS))
    for _ in range(rng.randint(1, 20)):
        for _ in range(rng.randint(0, 20)):
            topics.step()
        query.batch()
        if rng.random() < 0.02:
            topics.grow()
    drained(query)
    for place in topics.data:
        found = [(row["offset"], row["transaction_id"]) for row in query.rows[place]]
        assert found == topics.changes(place), seed
    _check_facts(query, seed)


def _check_facts(query: Query, case: int) -> None:
    rows = [row for batch in query.batches for row in batch]
    seen: dict[tuple, int] = defaultdict(int)
    last: dict[tuple, dict] = {}
    for row in rows:
        name = row["transaction_id"]
        if name is None:
            assert row["partition_complete"] is None, case
            continue
        assert row["transaction_event_count"] == query.topics.counts[name], case
        seen[row["place"], name] += 1
        assert row["partition_order"] == seen[row["place"], name], case
        last[row["place"], name] = row
    for row in rows:
        if row["partition_complete"]:
            assert last[row["place"], row["transaction_id"]] is row, case
    # Once a batch is complete, no more of its transactions comes later.
    given: set[str] = set()
    for batch in query.batches:
        names = {row["transaction_id"] for row in batch if row["transaction_id"] is not None}
        assert not given & names, case
        given |= {row["transaction_id"] for row in batch if row["whole"] and row["transaction_id"]}
    if query.limits.offsets is None:
        assert all(row["whole"] for row in rows), case
        ends = defaultdict(list)
        for row in rows:
            if row["transaction_id"] is not None:
                ends[row["place"], row["transaction_id"]].append(row["partition_complete"])
        assert all(each == [False] * (len(each) - 1) + [True] for each in ends.values()), case


SOUND_PROGRESS, SOUND_COMPLETED = RangeJoin.progress, range_join_module._completed


def _behind(join: RangeJoin) -> Progress:
    found = SOUND_PROGRESS(join)
    return replace(found, position=replace(found.position, data=found.data))


def _hasty(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, int]:
    return SOUND_COMPLETED(batch)[0], len(batch)


PLANTED = {
    "an END says that its rows can be read": (planning_module, "_is_committed", lambda *_: True),
    "rows of the batch before are given again": (RangeJoin, "_given_before", lambda *_: 0),
    "rows that wait are passed": (RangeJoin, "progress", _behind),
    "what is read at a time says which row is the last": (range_join_module, "_completed", _hasty),
    "a range ends where it was asked to begin": (RangeJoin, "is_over", lambda join, *_: not join.data_queued),
}


@pytest.mark.parametrize("bug", PLANTED)
@pytest.mark.slow
def test_a_planted_bug_in_plans_and_ranges_is_found(bug, monkeypatch):
    owner, name, instead = PLANTED[bug]
    monkeypatch.setattr(owner, name, instead)
    for seed in range(20):
        try:
            _check_seed(seed, postgres=bool(seed % 2))
        except (AssertionError, TailraceError):
            return
    pytest.fail("it was not found")


def state(transactions: int, first: int, committed: int, written: int) -> ClusterState:
    return ClusterState(
        Ends(0, transactions, transactions), {"t": "1"}, {("t", 0): Ends(first, committed, written)}
    )


def test_transactions_are_settled_once_all_earlier_writes_are_committed() -> None:
    settling = Settling()
    assert settling.look(state(5, 0, 10, 12)) is None
    assert settling.look(state(6, 0, 11, 20)) is None
    assert settling.look(state(7, 0, 12, 30)) == SettledTransactions(5, {("t", 0): 12})
    assert settling.look(state(8, 0, 31, 31)) == SettledTransactions(8, {("t", 0): 31})


def plan_of(end: int, topics: dict[str, str] | None = None) -> BatchPlan:
    partition = PartitionPlan(Position(3, 1), 3, end, 3)
    return BatchPlan("g", topics or {"t": "1"}, 1, 2, {("t", 0): partition})


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (plan_of(10, {"t": "0"}), state(9, 0, 20, 20), "created again"),
        (plan_of(10, {"t": "1", "other": "2"}), state(9, 0, 20, 20), "not one of the query's any more"),
        (plan_of(10), state(9, 11, 20, 20), "were removed"),
        (plan_of(10), state(9, 0, 9, 9), "fewer records"),
        (plan_of(10), state(1, 0, 20, 20), "transaction topic has fewer"),
        (plan_of(10), replace(state(9, 0, 20, 20), data={}), "not there any more"),
    ],
)
def test_other_topics_than_those_of_the_checkpoint_are_refused(
    before: BatchPlan, now: ClusterState, said: str
) -> None:
    with pytest.raises(TailraceError, match=said) as caught:
        next_plan(before, now, None, {}, BatchLimits(), 0)
    assert caught.value.kind is Kind.LOG_RANGE_GONE


def test_a_limit_includes_waiting_rows_and_is_divided_by_lag() -> None:
    places = [("t", number) for number in range(3)]
    now = ClusterState(Ends(0, 9, 9), {"t": "1"}, {place: Ends(0, 1000, 1000) for place in places})
    before = first_plan("g", now, dict(zip(places, (0, 500, 1000), strict=True)), 0)
    plan = next_plan(before, now, None, {}, BatchLimits(offsets=300), 0)
    assert [each.end for each in plan.partitions.values()] == [200, 600, 1000]
    waits = {place: Progress(Position(plan.partitions[place].begin, 0), plan.partitions[place].end, 0)
             for place in places[:2]}  # fmt: skip
    assert next_plan(plan, now, None, waits, BatchLimits(offsets=300), 0).ends_as(plan)
    # Without their progress it is not known that they wait: they are read further.
    assert not next_plan(plan, now, None, {}, BatchLimits(offsets=300), 0).ends_as(plan)


def test_progress_of_a_later_batch_is_not_used() -> None:
    before = plan_of(10)
    now = state(9, 0, 20, 20)
    later = Progress(Position(15, 7), 15, 8)
    plan = next_plan(before, now, None, {("t", 0): later}, BatchLimits(), 0)
    assert plan.partitions["t", 0].position == Position(3, 1)
    own = Progress(Position(8, 2), 10, 2)
    plan = next_plan(before, now, None, {("t", 0): own}, BatchLimits(), 0)
    assert plan.partitions["t", 0].position == Position(8, 2)


def test_progress_of_another_form_is_ignored() -> None:
    for kept in (None, {}, [], [1, 2], [2, 1, 1, 1, 1, 1, 1], [1, "x", 1, 1, 1, 1, 1]):
        assert decoded_progress(kept) is None


@pytest.mark.follows("log_format_unknown")
def test_a_checkpoint_of_a_later_version_is_refused_and_read_by_that_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as later:
        later.setattr(planning_module, "_VERSION", 2)
        kept = encoded(plan_of(10))
    with pytest.raises(TailraceError) as caught:
        decoded(kept)
    assert caught.value.kind is Kind.LOG_FORMAT_UNKNOWN
    assert "use the version of Tailrace that made the checkpoint" in caught.value.hint
    monkeypatch.setattr(planning_module, "_VERSION", 2)
    assert decoded(kept) == plan_of(10)


def test_a_missing_transaction_is_reported_once_a_later_one_is_there() -> None:
    wanted = JoinRange(("t.a", 0), Position(), 0, 2, 0, 1, is_whole=True, is_batch_whole=True)
    join = RangeJoin(wanted, DebeziumJson())
    columns = {"key": [b"1", b"2"], "timestamp_ms": [0, 0]}

    def messages(documents: list[dict], offsets: list[int]) -> pa.RecordBatch:
        values = [json.dumps(document).encode() for document in documents]
        count = len(values)
        return pa.RecordBatch.from_arrays(
            [
                pa.array(columns["key"][:count], pa.binary()),
                pa.array(values, pa.binary()),
                pa.array(np.array(offsets)),
                pa.array(columns["timestamp_ms"][:count]),
            ],
            ["key", "value", "offset", "timestamp_ms"],
        )

    join.add_data(messages([{"transaction": {"id": "f:1"}}, {"transaction": {"id": "f:2"}}], [0, 1]))
    join.add_transactions(messages([{"status": "END", "id": "f:2", "event_count": 1, "ts_ms": 1}], [0]))
    assert join.take() is None
    assert join.is_over(2, 1)
    with pytest.raises(TailraceError, match="that of a later row is") as caught:
        join.rest()
    assert caught.value.kind is Kind.JOIN_VIOLATED
    assert {"topic", "partition", "rule", "data_offset", "transaction_offset"} <= caught.value.context.keys()


def test_a_waiting_row_does_not_keep_passed_transactions_in_memory() -> None:
    place: Place = ("t.a", 0)
    join = RangeJoin(JoinRange(place, Position(), 0, 1, 0, 1 << 40, True, True), DebeziumJson())
    own = {"op": "c", "source": {"sequence": '["9000000","9000000"]'}, "transaction": {"id": "1:9000001"}}
    join.add_data(batch_of(0, [own]))
    held = []
    for first in range(0, 40_000, 2000):
        numbers = range(first, first + 2000)
        join.add_transactions(
            batch_of(first, [{"status": "END", "id": f"{number + 2}:{number + 2}"} for number in numbers])
        )
        assert join.take() is None
        held.append(pa.total_allocated_bytes())
    # The merge remembers the last ten thousand transactions.
    assert held[-1] - held[9] < 100_000, held


def batch_of(first: int, documents: list[dict]) -> pa.RecordBatch:
    rows = [
        {"key": b"k", "value": json.dumps(document).encode(), "offset": offset, "timestamp_ms": 1}
        for offset, document in enumerate(documents, first)
    ]
    return pa.RecordBatch.from_pylist(rows, MESSAGES)
