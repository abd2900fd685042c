"""Which shards serve, asked for now and then, without waiting for the answer."""

from __future__ import annotations

from concurrent.futures import Future

import structlog

from tailrace.config.source.vitess import VitessSource
from tailrace.errors import TailraceError
from tailrace.sources.vitess.connection.metadata import ask_shards, shards_in
from tailrace.sources.vitess.connection.vtgate import Row, Vtgate

log = structlog.get_logger(__name__)

#: So long after one answer the next question is put; and after a failure, or while a shard is so new that no
#: list had it.
LIST_INTERVAL_S = 30.0
SOON_INTERVAL_S = 2.0
#: After so many failures in a row there is a warning.
FAILURES_TOLD = 3


class ServingShards:
    """Asks a vtgate, for the first time at once. For one thread."""

    def __init__(self, source: VitessSource, vtgate: Vtgate) -> None:
        self._source, self._vtgate = source, vtgate
        self._asked: Future[list[Row]] | None = None
        self._since_s = float("-inf")
        self._failures = 0  # in a row

    def turn(self, now_s: float, *, is_any_new: bool) -> tuple[str, ...] | None:
        """Return an answer that has come; ask if it is time to. None: there is none now.

        :param is_any_new: whether a shard is read that no list had yet.
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
            # vtgate gives one error of its topology server to all who ask within a second.
            if self._failures == FAILURES_TOLD:
                log.warning("vtgate does not say which shards serve; it is asked again", error=error.message)
            return None
        self._failures = 0
        return shards
