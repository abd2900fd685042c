"""Asks the servers of silent shards for their transactions: heartbeats only prove that vtgate is alive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import structlog

from tailrace.config.source.vitess import VitessSource
from tailrace.errors import TailraceError
from tailrace.sources.vitess.connection.metadata import ask_gtids, ask_gtids_of_any, of_primary
from tailrace.sources.vitess.connection.vtgate import Row, Vtgate
from tailrace.sources.vitess.resharding.coordinator import Coordinator
from tailrace.sources.vitess.resharding.events import Event, Probed, ProbeFailed
from tailrace.sources.vitess.resharding.gtid_sets import GtidSet
from tailrace.sources.vitess.streaming.shard_health import ShardProgress

log = structlog.get_logger(__name__)

#: Time in seconds with only heartbeats after which a shard's server is asked for its transactions.
PROBE_S = 20.0
#: Limit of the doublings of that wait, one each time the stream is opened again because of it: the first
#: response may take longer, if a table is sorted, or a large transaction is sent at its end (vtgate 22).
STALLS_MAX = 10
#: Limit of shards asked at a time.
PROBES_MAX = 16


@dataclass(frozen=True, slots=True)
class _Probe:
    """A request for a shard's transactions that is not answered yet.

    :param of: the type of the tablet that is asked.
    :param newest: the primary's answer: what was committed is there first.
    """

    attempt: int
    of: str
    serves: bool
    answer: Future[list[Row]]
    newest: Future[list[Row]]


class SilentShards:
    """The requests to silent shards. For the thread that has its turn at the log.

    :param shards: the progress of each shard; it is updated.
    :param step: passes an event to the coordinator, and carries out its commands.
    :param now_us: the clock, microseconds since 1970.
    """

    def __init__(
        self,
        source: VitessSource,
        vtgate: Vtgate,
        coordinator: Coordinator,
        shards: Mapping[str, ShardProgress],
        step: Callable[[Event], None],
        now_us: Callable[[], int],
    ) -> None:
        self._source, self._vtgate = source, vtgate
        self._primary = of_primary(source)
        self._coordinator = coordinator
        self._shards = shards
        self._step = step
        self._now_us = now_us
        self._probes: dict[str, _Probe] = {}  # unanswered, by shard

    def turn(self, now_s: float) -> None:
        """Ask silent shards for their transactions, some at a time; process the answers that have arrived."""
        self._ask(now_s)
        for shard, probe in list(self._probes.items()):
            if probe.answer.done() and probe.newest.done():
                del self._probes[shard]
                self._take(shard, probe)

    def _ask(self, now_s: float) -> None:
        # For a shard that may be behind, the primary is asked, however often its stream was opened meanwhile;
        # for one that no longer serves, too: the primary has a journal first.
        for shard, known in self._shards.items():
            held = self._coordinator.shards[shard]
            since_s, patience_s = known.probed_s, PROBE_S
            if not held.behind:
                since_s = max(known.moved_s, known.probed_s)
                patience_s *= 2 ** min(known.stalls, STALLS_MAX)
            if len(self._probes) < PROBES_MAX and now_s - since_s > patience_s:
                known.probed_s, known.asked_us = now_s, self._now_us()
                if self._coordinator.accepts(shard, held.attempt) and shard not in self._probes:
                    serves = not self._coordinator.is_unlisted(shard)
                    of = self._source.tablet_type if serves and not held.behind else "primary"
                    answer = ask_gtids_of_any(self._vtgate, self._source, shard, of)
                    newest = answer if of == "primary" else ask_gtids(self._vtgate, self._primary, shard)
                    self._probes[shard] = _Probe(held.attempt, of, serves, answer, newest)

    def _take(self, shard: str, probe: _Probe) -> None:
        try:
            executed, purged = (text or "" for text in probe.answer.result()[0])
        except TailraceError as error:
            log.warning("asking a silent shard for its position failed", shard=shard, error=error.message)
            self._step(ProbeFailed(shard, probe.attempt, error.message))
            return
        if probe.of != self._source.tablet_type:
            purged = ""  # what another tablet has purged doesn't matter
        self._step(Probed(shard, probe.attempt, executed, purged, probe.serves))
        if self._coordinator.shards[shard].attempt != probe.attempt:
            self._shards[shard].stalls += 1
        if probe.newest.exception() is None:
            newest = GtidSet.parse(probe.newest.result()[0][0] or "")
            self._note_complete(shard, newest, of=probe.of)
            if probe.newest is not probe.answer:
                # A replica may have what a failover lost.
                self.doubt_if_behind(shard, newest)

    def _note_complete(self, shard: str, newest: GtidSet, *, of: str) -> None:
        """Note whether the log has everything that was committed in a silent shard."""
        ours, known = self._coordinator.shards[shard].kept, self._shards.get(shard)
        if known is None or not ours.is_read:
            return
        is_complete = GtidSet.parse(ours.gtid).contains(newest)
        known.lags = of != "primary" and not is_complete
        if is_complete:
            # Commits in the second of the request have that second as their time.
            asked_us = known.asked_us // 1_000_000 * 1_000_000
            known.whole_until_us = max(known.whole_until_us, asked_us)

    def doubt_if_behind(self, shard: str, executed: GtidSet) -> None:
        """Ask a shard again at once if it lacks transactions that were read: it may only lag."""
        held = self._coordinator.shards.get(shard)
        if held is None or not self._coordinator.accepts(shard, held.attempt) or not held.kept.is_read:
            return
        if not executed.contains(GtidSet.parse(held.kept.gtid)):
            self._step(Probed(shard, held.attempt, str(executed), ""))
            self._shards[shard].probed_s = -PROBE_S
