"""Settings of the clients: what the guarantees rest on, over what the configuration gives."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from tailrace.kafka.client.failures import unfit_options

log = structlog.get_logger(__name__)

#: The queue of a producer; what is in it is bounded by `sending` long before.
_QUEUE_KBYTES = 1 << 20
_QUEUE_MESSAGES = 2_000_000


#: Of records in one batch, before compression. Brokers compare batches with a topic's `max.message.bytes`
#: (1 048 588, unless it is set) after it, and the benchmarks' changes, as JSON, shrink to less than a
#: quarter. Each batch is a request: with these a broker took a third to a half less CPU time than with 1 MB.
BATCH_BYTES = 4_000_000
#: Of those that fit whether they shrink or not, and librdkafka's own measure.
SAFE_BATCH_BYTES = 1_000_000
#: Of such batches; small records are many.
_BATCH_MESSAGES = 100_000

#: What is said again within so many seconds is counted only: that a broker refuses connections, thirty
#: times a second.
_REPEATED_S = 30.0
#: Most that is remembered of what was said.
_SAID_MAX = 256
#: In what it says: how long that took, and which client it is.
_PASSING_PART = re.compile(r"\(after \d+ms|rdkafka#\w+-\d+")


class ToLog(logging.Handler):
    """What librdkafka has to say, as events of our own log; it never shows values of settings.

    :param clock: seconds, rising.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._said: dict[str, tuple[float, int]] = {}  # when it was last logged, how often it came since

    def emit(self, record: logging.LogRecord) -> None:
        says, now = record.getMessage(), self._clock()
        what = _PASSING_PART.sub("", says)
        logged, withheld = self._said.get(what, (now - _REPEATED_S, 0))
        if now < logged + _REPEATED_S:
            self._said[what] = logged, withheld + 1
            return
        if len(self._said) >= _SAID_MAX:
            self._said.clear()
        self._said[what] = now, 0
        say = log.warning if record.levelno >= logging.ERROR else log.debug
        say("kafka client", says=says, **({"repeated": withheld} if withheld else {}))


_logger = logging.getLogger("tailrace.kafka")
_logger.setLevel(logging.INFO)
_logger.propagate = False
_logger.addHandler(ToLog())


#: The part of the time for a commit after which an answer is no longer waited for, and the least of it: a
#: broker that stands still closes nothing, and who has its place must be asked while there is time.
_ANSWER_SHARE = 3
_ANSWER_MS_MIN = 10_000
#: Least that a transaction is given.
TRANSACTION_MS_MIN = 60_000
#: Longest that a batch may take which can't be smaller: the longest transaction that brokers allow, unless
#: their transaction.max.timeout.ms says otherwise.
LONGEST_MS = 900_000

#: By so much it must be shorter than the longest that a transaction may take.
_ANSWER_MARGIN_MS = 100


def client(bootstrap: str, options: Mapping[str, str], timeout_ms: int) -> dict[str, Any]:
    """Return what every client has.

    :param timeout_ms: longest that a commit may take, and a question.
    """
    answer_ms = max(timeout_ms // _ANSWER_SHARE, _ANSWER_MS_MIN)
    return {"socket.timeout.ms": answer_ms, **options, "bootstrap.servers": bootstrap, "logger": _logger}


def producer(
    common: Mapping[str, Any],
    timeout_ms: int,
    transactional_id: str | None,
    batch_bytes: int = SAFE_BATCH_BYTES,
    limit_ms: int = 0,
) -> dict[str, Any]:
    """Return a producer's settings: idempotent, in order, acknowledged by all replicas.

    :param timeout_ms: longest that is waited while nothing is delivered.
    :param transactional_id: None for a producer without transactions.
    :param batch_bytes: size of a batch, where `common` gives none.
    :param limit_ms: least that a transaction is given, where `common` says nothing.
    :raises TailraceError: `SINK_MISCONFIGURED` for an option that is to be a number and is none.
    """
    _require_numbers(common)
    found: dict[str, Any] = {
        "partitioner": "murmur2_random",  # as Java's clients place keys
        "linger.ms": "20",
        "compression.type": "lz4",
        "delivery.report.only.error": True,
        "batch.size": batch_bytes,
        "batch.num.messages": _BATCH_MESSAGES,
        # Who waits gives up earlier if nothing is delivered. What is, but slowly, is no failure.
        "message.timeout.ms": max(timeout_ms, LONGEST_MS),
        **common,
        "enable.idempotence": True,
        "acks": "all",
        "queue.buffering.max.messages": _QUEUE_MESSAGES,
        "queue.buffering.max.kbytes": _QUEUE_KBYTES,
    }
    # The client's measure of a batch, too. What a record may have was looked at before.
    found["message.max.bytes"] = max(
        int(found["batch.size"]), int(common.get("message.max.bytes", SAFE_BATCH_BYTES))
    )
    if transactional_id is not None:
        found["transactional.id"] = transactional_id
        found.setdefault("transaction.timeout.ms", max(timeout_ms, TRANSACTION_MS_MIN, limit_ms))
        longest = int(found["transaction.timeout.ms"])
        found["message.timeout.ms"] = min(int(found["message.timeout.ms"]), longest)
        if "socket.timeout.ms" in found:
            found["socket.timeout.ms"] = min(int(found["socket.timeout.ms"]), longest - _ANSWER_MARGIN_MS)
    return found


def _require_numbers(common: Mapping[str, Any]) -> None:
    # Those that others are reckoned from; of the rest the client says it.
    for name in (
        "batch.size",
        "message.max.bytes",
        "message.timeout.ms",
        "transaction.timeout.ms",
        "socket.timeout.ms",
    ):
        try:
            int(common.get(name, 0))
        except ValueError:
            raise unfit_options(f"{name} is no whole number", str(common["bootstrap.servers"])) from None


def consumer(common: Mapping[str, Any], isolation: str) -> dict[str, Any]:
    """Return the settings of a consumer that reads a partition from its start, and commits nothing."""
    return {
        **{name: value for name, value in common.items() if not _is_producers(name)},
        "group.id": "tailrace-offsets-reader",  # the client wants one; nothing is ever committed under it
        "enable.auto.commit": False,
        "auto.offset.reset": "error",
        "enable.partition.eof": True,
        # The end of a partition is known by an empty answer: the broker is not to wait for more.
        "fetch.wait.max.ms": 5,
        "isolation.level": isolation,
    }


def admin(common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an admin client."""
    return {name: value for name, value in common.items() if not _is_producers(name)}


def _is_producers(name: str) -> bool:
    beginnings = (
        "compression.",
        "linger.",
        "batch.",
        "message.timeout",
        "transaction.",
        "partitioner",
        "request.",
    )
    return name.startswith(beginnings)
