"""Which shards serve, asked for now and then, without waiting for the answer."""

from __future__ import annotations

from concurrent.futures import Future

import structlog

from tailrace.config.source.vitess import VitessSource
from tailrace.errors import TailraceError
from tailrace.sources.vitess.connection.metadata import ask_shards, shards_in
from tailrace.sources.vitess.connection.vtgate import Row, Vtgate

log = structlog.get_logger(__name__)

#: So long after one answer the next question is put.
LIST_INTERVAL_S = 30.0


class ServingShards:
    """Asks a vtgate. For one thread."""

    def __init__(self, source: VitessSource, vtgate: Vtgate, now_s: float) -> None:
        self._source, self._vtgate = source, vtgate
        self._asked: Future[list[Row]] | None = None
        self._since_s = now_s

    def turn(self, now_s: float) -> tuple[str, ...] | None:
        """Return an answer that has come; ask if it is time to. None: there is none now."""
        if self._asked is None:
            if now_s - self._since_s > LIST_INTERVAL_S:
                self._asked = ask_shards(self._vtgate)
            return None
        if not self._asked.done():
            return None
        answer, self._asked, self._since_s = self._asked, None, now_s
        try:
            return shards_in(answer.result(), self._source)
        except TailraceError as error:
            log.warning("vtgate does not say which shards serve", error=error.message)
            return None
