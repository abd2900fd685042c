"""Settings of the clients: those that the guarantees need override the configuration's."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from tailrace.kafka.client.failures import unfit_options

log = structlog.get_logger(__name__)

#: Limits of a producer's queue; `Sender` allows far less in it.
_QUEUE_KBYTES = 1 << 20
_QUEUE_MESSAGES = 2_000_000


#: Size of a batch before compression. Brokers compare the compressed batch with a topic's
#: `max.message.bytes` (default 1 048 588), and the benchmarks' changes, as JSON, shrink to less than a
#: quarter. Each batch is a request: with 4 MB a broker took a third to a half less CPU time than with 1 MB.
BATCH_BYTES = 4_000_000
#: Size of a batch that fits without compression, and librdkafka's default.
SAFE_BATCH_BYTES = 1_000_000
#: Largest number of records in a batch, for small records.
_BATCH_MESSAGES = 100_000

#: A message repeated within this time, in seconds, is only counted: for example, that a broker refuses
#: connections, thirty times a second.
_REPEATED_S = 30.0
#: Largest number of different messages that are remembered.
_SAID_MAX = 256
#: The parts of a message that vary: a duration, and the client's name.
_PASSING_PART = re.compile(r"\(after \d+ms|rdkafka#\w+-\d+")


class ToLog(logging.Handler):
    """A handler that writes librdkafka's messages to Tailrace's log; they never contain values of settings.

    :param clock: a monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._said: dict[str, tuple[float, int]] = {}  # time last logged, repetitions since then

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


#: A socket waits for an answer for this fraction (1/n) of a commit's timeout, and for no less than the
#: minimum: a hung broker closes no connection, and its successor must be asked while there is time.
_ANSWER_SHARE = 3
_ANSWER_MS_MIN = 10_000
#: Minimum timeout of a transaction.
TRANSACTION_MS_MIN = 60_000
#: Timeout of a batch that can't be made smaller: the longest transaction that brokers allow by default
#: (transaction.max.timeout.ms).
LONGEST_MS = 900_000

#: By how much the wait for an answer must be shorter than a transaction's timeout.
_ANSWER_MARGIN_MS = 100


def client(bootstrap: str, options: Mapping[str, str], timeout_ms: int) -> dict[str, Any]:
    """Return the settings that all clients share.

    :param timeout_ms: timeout of a commit, and of a request.
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

    :param timeout_ms: longest wait without a delivery.
    :param transactional_id: None for a producer without transactions.
    :param batch_bytes: size of a batch, unless `common` sets one.
    :param limit_ms: minimum timeout of a transaction, unless `common` sets one.
    :raises TailraceError: `SINK_MISCONFIGURED` for an option that must be a number and is not.
    """
    _require_numbers(common)
    found: dict[str, Any] = {
        "partitioner": "murmur2_random",  # as Java's clients
        "linger.ms": "20",
        "compression.type": "lz4",
        "delivery.report.only.error": True,
        "batch.size": batch_bytes,
        "batch.num.messages": _BATCH_MESSAGES,
        # Without any delivery the sender gives up earlier. Slow delivery is not a failure.
        "message.timeout.ms": max(timeout_ms, LONGEST_MS),
        **common,
        "enable.idempotence": True,
        "acks": "all",
        "queue.buffering.max.messages": _QUEUE_MESSAGES,
        "queue.buffering.max.kbytes": _QUEUE_KBYTES,
    }
    # The client applies it to batches, too. Records are checked against the configured limit before.
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
    # Only the settings that others are computed from; the client checks the rest.
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
            raise unfit_options(f"{name} is not an integer", str(common["bootstrap.servers"])) from None


def consumer(common: Mapping[str, Any], isolation: str) -> dict[str, Any]:
    """Return the settings of a consumer that reads a partition from its start, and commits nothing."""
    return {
        **{name: value for name, value in common.items() if not _is_producers(name)},
        "group.id": "tailrace-offsets-reader",  # the client requires one; nothing is ever committed to it
        "enable.auto.commit": False,
        "auto.offset.reset": "error",
        "enable.partition.eof": True,
        # An empty answer marks the end of a partition: the broker should not wait for more records.
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
