"""Another engine that has begun, as distinct from a transaction that was open for too long.

The cluster fences a producer in either case. The lease in the task's head is another's in the first alone.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NoReturn

from tailrace.errors import Kind, TailraceError
from tailrace.kafka.client.failures import LIMIT_S
from tailrace.kafka.offsets.topic import OffsetsTopic
from tailrace.kafka.producer.account import Account
from tailrace.kafka.producer.writer import Writer

#: The part of its time after which a batch may have been ended for it: clocks differ.
_NEARLY = 0.9


def is_taken(offsets: OffsetsTopic, account: Account, ours: Collection[str | None]) -> bool:
    """Tell whether another engine has taken a task: whether its head has a lease that is none of `ours`.

    :param ours: None: there was no head.
    :raises TailraceError: where that can't be looked up.
    """
    try:
        found = offsets.settled(account.key, account.isolation)
    except TailraceError as error:
        attempted = f"look whether another engine has taken over: {error.message}"
        raise TailraceError(error.kind, attempted, error.hint, error.context) from error
    return (None if found is None else found.get("lease", "")) not in ours


def raise_out_of_time(error: TailraceError, writer: Writer) -> NoReturn:
    """Raise what a batch met that nobody else has ended: where its time was too short, with what that was.

    An error of kind `SINK_PREEMPTED` is one that may pass then: the cluster has ended the transaction.
    :raises TailraceError: always.
    """
    progress, limit_s = writer.progress, writer.limit_s
    is_over = progress.seconds >= limit_s * _NEARLY
    if error.kind not in (Kind.SINK_PREEMPTED, Kind.SINK_WRITE_FAILED) or (
        error.kind is Kind.SINK_WRITE_FAILED and not is_over
    ):
        raise error
    found = (
        f"{progress.delivered} of {progress.records} records ({progress.bytes} bytes) were delivered in "
        f"{progress.seconds:.0f} s"
    )
    if not is_over:
        raise TailraceError(
            Kind.SINK_WRITE_FAILED,
            f"write a batch: the cluster has ended its transaction; {found}; nobody else has taken over",
            "it is begun again",
            error.context,
        ) from error
    context = error.context
    if progress.idle_s < limit_s / 2:
        context[LIMIT_S] = round(limit_s, 3)
    raise TailraceError(
        Kind.SINK_WRITE_FAILED,
        f"write a batch: {found}, and {limit_s:g} s are the most that it may take",
        "it is begun again, with less where it holds several transactions of the source; this process may "
        "have stood still, or the cluster is slow: see its quotas",
        context,
    ) from error


def too_long(error: TailraceError, way_out: str, **context: object) -> TailraceError:
    """Return the error of a transaction of the source that does not fit into the time of one of Kafka's.

    :param error: as `raise_out_of_time` raises it.
    :param way_out: what else than more time helps.
    """
    return TailraceError(
        Kind.SINK_TRANSACTION_TOO_LONG,
        f"write a transaction of the source: {error.message.removeprefix('write a batch: ')}",
        "raise transaction.timeout.ms in `options` (and transaction.max.timeout.ms of the brokers, which "
        f"bounds it), or the client's quota; or {way_out}",
        {**error.context, **context},
    )
