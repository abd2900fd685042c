"""The driver's side of `tailrace-join`: plans the next micro-batch from the cluster's offsets."""

from __future__ import annotations

import time
from collections.abc import Mapping

import structlog

from tailrace.errors import Kind, TailraceError
from tailrace.join.planning import (
    BatchLimits,
    BatchPlan,
    ClusterState,
    Ends,
    Place,
    SettledTransactions,
    Settling,
    first_plan,
    next_plan,
    require_identifiers,
)
from tailrace.spark.join.cluster import JoinCluster
from tailrace.spark.join.options import LATEST, GivenOffsets, JoinReadOptions

log = structlog.get_logger(__name__)

#: Shortest interval of requests to the cluster, in seconds: without new records Spark asks continuously.
_ASK_S = 0.1
#: Time within which all brokers know a new partition, in seconds.
_KNOWN_S = 30.0


class JoinPlanner:
    """Plans micro-batches one after the other. One thread; connects at the first call.

    :param options: of the query.
    """

    def __init__(self, options: JoinReadOptions) -> None:
        self._options = options
        self._kept_cluster: JoinCluster | None = None
        self._settling = Settling()
        self._fixed: tuple[ClusterState, SettledTransactions | None] | None = None
        self._new_from: int | None = None
        self._later_new_from, self._looked_s = 0, 0.0
        self._asked_s = 0.0

    @property
    def _cluster(self) -> JoinCluster:
        if self._kept_cluster is None:
            self._kept_cluster = JoinCluster(self._options)
        return self._kept_cluster

    def first(self, group: str) -> BatchPlan:
        """Return the plan that ends at `startingOffsets`, after which the first batch starts."""
        # With `availableNow` Spark may call `end_now` before this.
        state = self._cluster.state() if self._fixed is None else self._fixed[0]
        return self._started(group, state)

    def next(self, before: BatchPlan, limits: BatchLimits) -> BatchPlan:
        """Return the plan of the batch after `before`, which was read."""
        if self._fixed is None:
            time.sleep(max(0.0, self._asked_s + _ASK_S - time.monotonic()))
            self._asked_s = time.monotonic()
            state = self._cluster.state()
            settled = self._settling.look(state)
        else:
            state, settled = self._fixed
        places = [place for place, each in before.partitions.items() if each.has_rows]
        progress = self._cluster.progress(before.group, places) if places else {}
        new_from = self._new_partitions_from(before, state)
        plan = next_plan(before, state, settled, progress, limits, new_from)
        if added := plan.partitions.keys() - before.partitions.keys():
            log.info("partitions were added", topics=sorted({topic for topic, _ in added}), count=len(added))
        return plan

    def end_now(self) -> None:
        """Fix the end of the query: later records are not read."""
        self._fixed = self._cluster.settled_state(self._settling)

    def whole_range(self) -> BatchPlan:
        """Return the plan of a batch from `startingOffsets` to `endingOffsets`, with uncommitted records."""
        state = self._cluster.state()
        before = self._started(self._options.group_id_prefix, state)
        wanted = {place: ends.written for place, ends in state.data.items()}
        transactions, ending = state.transactions.committed, self._options.ending
        if isinstance(ending, GivenOffsets):
            _require_known(ending, state, self._options.transactions, "endingOffsets")
            wanted |= ending.places
            transactions = transactions if ending.transactions is None else ending.transactions
            bounds = {place: (each.end, wanted[place]) for place, each in before.partitions.items()}
            _require_in_order({(self._options.transactions, 0): (before.end, transactions), **bounds})
        data = {place: Ends(ends.first, wanted[place], ends.written) for place, ends in state.data.items()}
        settled = SettledTransactions(
            transactions, {place: ends.written for place, ends in state.data.items()}
        )
        cut = ClusterState(state.transactions, state.topics, data)
        return next_plan(before, cut, settled, {}, BatchLimits(), before.end)

    def await_committed(self, plan: BatchPlan) -> None:
        """Wait until all records of a plan can be read.

        :raises TailraceError: `SOURCE_UNREACHABLE`.
        """
        self._cluster.await_committed({place: each.end for place, each in plan.partitions.items()})

    def require_topics(self, plan: BatchPlan) -> None:
        """Refuse a plan of which a topic was created again since.

        :raises TailraceError: `LOG_RANGE_GONE`.
        """
        require_identifiers(plan, self._cluster.topics)

    def close(self) -> None:
        """Close the connections."""
        if self._kept_cluster is not None:
            self._kept_cluster.close()
            self._kept_cluster = None

    def _started(self, group: str, state: ClusterState) -> BatchPlan:
        starting = self._options.starting
        if starting == LATEST:
            # Records that are written after this belong to transactions that end later.
            positions = {place: ends.written for place, ends in state.data.items()}
            return first_plan(group, state, positions, state.transactions.committed)
        positions = {place: ends.first for place, ends in state.data.items()}
        transactions = state.transactions.first
        if isinstance(starting, GivenOffsets):
            _require_known(starting, state, self._options.transactions, "startingOffsets")
            positions |= starting.places
            transactions = transactions if starting.transactions is None else starting.transactions
        return first_plan(group, state, positions, transactions)

    def _new_partitions_from(self, before: BatchPlan, state: ClusterState) -> int:
        # The first transaction that may have rows in partitions that some broker did not know `_KNOWN_S` ago.
        if self._new_from is None:
            self._new_from = self._later_new_from = before.begin
            self._looked_s = time.monotonic()
        found = self._new_from
        if time.monotonic() >= self._looked_s + _KNOWN_S:
            self._new_from, self._later_new_from = self._later_new_from, state.transactions.committed
            self._looked_s = time.monotonic()
        return found


def _require_in_order(bounds: Mapping[Place, tuple[int, int]]) -> None:
    for (topic, number), (start, end) in bounds.items():
        if start > end:
            raise TailraceError(
                Kind.CONFIG_INVALID,
                f"join topics of Kafka in Spark: startingOffsets is {start}, after endingOffsets, {end}",
                "set larger endingOffsets, or leave them out; load() fixes both",
                {"topic": topic, "partition": number},
            )


def _require_known(given: GivenOffsets, state: ClusterState, transactions: str, option: str) -> None:
    for (topic, number), offset in given.places.items():
        if (ends := state.data.get((topic, number))) is None:
            raise TailraceError(
                Kind.CONFIG_INVALID,
                f"join topics of Kafka in Spark: {option} names partition {number} of topic {topic!r}, "
                "which is not read",
                "name partitions of the topics in the option data",
                {"topic": topic, "partition": number, "offset": offset},
            )
        _require_there(option, (topic, number), offset, ends)
    if given.transactions is not None:
        _require_there(option, (transactions, 0), given.transactions, state.transactions)


def _require_there(option: str, place: Place, offset: int, ends: Ends) -> None:
    topic, number = place
    if not ends.first <= offset <= ends.written:
        raise TailraceError(
            Kind.LOG_RANGE_GONE if offset < ends.first else Kind.LOG_RANGE_INVALID,
            f"read topic {topic} from {option}: partition {number} has offsets {ends.first} to "
            f"{ends.written}",
            "name an offset that exists",
            {"topic": topic, "partition": number, "offset": offset},
        )
