"""Retention, turn by turn: now and then the log's old end is looked at."""

from __future__ import annotations

import time

import structlog

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.retention.policy import RetentionRules
from tailrace.changelog.retention.prune import apply
from tailrace.config import LogConfig
from tailrace.errors import Kind, TailraceError
from tailrace.sources.contract import Snapshots

log = structlog.get_logger(__name__)

INTERVAL_S = 10.0


class RetentionTimer:
    """Carries out a log's retention rules every few seconds, on the caller's thread.

    Only for the process that writes the log, and only when its readers are registered.

    :param snapshots: of the log: what an open one needs stays.
    """

    def __init__(self, config: LogConfig, task: str, snapshots: Snapshots | None) -> None:
        retention = config.retention
        self._path = config.path
        self._task = task
        self._snapshots = snapshots
        self._rules = RetentionRules(
            size_bytes=retention.size_bytes,
            age_s=retention.age_s,
            on_slow_reader=retention.on_slow_reader,
        )
        self._wanted = retention.size_bytes is not None or retention.age_s is not None
        self._next_s = 0.0
        self._held_by: tuple[str, ...] = ()

    def turn(self) -> None:
        """Apply the rules if it is time to. What fails is said, and tried again later: old
        segments that stay for a while hurt nobody.
        """
        if not self._wanted or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + INTERVAL_S
        try:
            directory = LogDirectory.open(self._path)
            keep_from = None if self._snapshots is None else self._snapshots.needed_from
            pruned = apply(directory, self._task, self._rules, keep_from=keep_from)
        except TailraceError as error:
            if error.kind is not Kind.LOG_MISSING:
                log.warning("retention failed", error=str(error))
            return
        if pruned.segments:
            log.info("retention", segments=len(pruned.segments), size_bytes=pruned.size_bytes)
        if pruned.dropped_readers:
            log.warning("retention dropped slow readers", readers=pruned.dropped_readers)
        if pruned.held_by and pruned.held_by != self._held_by:
            log.warning(
                "readers hold more of the log than retention allows",
                readers=pruned.held_by,
                hint="`tailrace log forget PATH --reader NAME` lets go of one that will not come back",
            )
        self._held_by = pruned.held_by
