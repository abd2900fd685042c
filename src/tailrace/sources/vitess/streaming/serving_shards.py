"""Lists the serving shards periodically, without waiting for vtgate's answer."""

from __future__ import annotations

from concurrent.futures import Future

import structlog

from tailrace.config.source.vitess import VitessSource
from tailrace.errors import TailraceError
from tailrace.sources.vitess.connection.metadata import ask_shards, shards_in
from tailrace.sources.vitess.connection.vtgate import Row, Vtgate

log = structlog.get_logger(__name__)

#: Time from an answer to the next request, in seconds; the shorter one applies after a failure, or while a
#: shard is read that was in no list yet.
LIST_INTERVAL_S = 30.0
SOON_INTERVAL_S = 2.0
#: Consecutive failures after which a warning is logged.
FAILURES_TOLD = 3


class ServingShards:
    """A periodic request for the serving shards; the first one is sent at once. For one thread."""

    def __init__(self, source: VitessSource, vtgate: Vtgate) -> None:
        self._source, self._vtgate = source, vtgate
        self._asked: Future[list[Row]] | None = None
        self._since_s = float("-inf")
        self._failures = 0  # in a row

    def turn(self, now_s: float, *, is_any_new: bool) -> tuple[str, ...] | None:
        """Return the shards if an answer has arrived, else None; send the next request when it is due.

        :param is_any_new: whether a shard is read that was in no list yet.
        """
        if self._asked is None:
            is_soon = is_any_new or self._failures > 0
            if now_s - self._since_s > (SOON_INTERVAL_S if is_soon else LIST_INTERVAL_S):
                self._asked = ask_shards(self._vtgate)
            return None
        if not self._asked.done():
            return None
        answer, self._asked, self._since_s = self._asked, None, now_s
        try:
            shards = shards_in(answer.result(), self._source)
        except TailraceError as error:
            self._failures += 1
            # vtgate answers all requests within a second with the same error of its topology server.
            if self._failures == FAILURES_TOLD:
                log.warning("listing the serving shards failed; it is retried", error=error.message)
            return None
        self._failures = 0
        return shards
