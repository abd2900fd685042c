"""The Spark session of an engine: started in parallel with capture, shared by all sinks."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from tailrace.config import EngineConfig, PipelineConfig
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline.background import Background, as_failure
from tailrace.spark.java import cores_of
from tailrace.spark.session import EngineSession

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = structlog.get_logger(__name__)

#: Longest start and stop of Spark. The first start may fetch Delta's jars over a slow line.
START_DEADLINE_S = 600.0
STOP_DEADLINE_S = 10.0
_POLL_S = 0.1


class SparkHost:
    """Starts Spark on a thread, gives its session to sinks, and starts it again if its JVM died.

    Every method may be called from any thread.
    """

    def __init__(self, config: EngineConfig | PipelineConfig) -> None:
        self._config = config
        self._spark = EngineSession()
        self._lock = threading.Lock()
        self._start = Background("spark", self._begin)
        self._started = False
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begin to start Spark if it was not started, failed to start or has died, unless `stop` was called.
        Returns at once.
        """
        with self._lock:
            if self._stopped.is_set() or (self._started and not self._is_gone()):
                return
            if self._started:
                self._start = Background("spark", self._begin)
            self._started = True
            self._start.start()

    @property
    def is_ready(self) -> bool:
        """Whether Spark has started, or failed to: `session` does not wait for it."""
        return self._start.ended

    @property
    def comes_first(self) -> bool:
        """Whether sinks wait for Spark before any write: a cluster's executors are checked at the start."""
        spark = self._config.spark
        return spark.start == "eager" and cores_of(spark.master) is None

    def session(self, stop: threading.Event, tag: str = "") -> SparkSession | None:
        """Return the session, starting it if needed; None if `stop` was set meanwhile, or the host stopped.

        :param tag: a tag for jobs that the calling thread starts from now on, for `cancel_jobs`.
        :raises TailraceError: `ENVIRONMENT_UNFIT` or `SPARK_FAILED` if it does not start.
        """
        self.start()
        start, waited_s = self._start, 0.0
        while not start.join(_POLL_S):
            waited_s += _POLL_S
            if stop.is_set() or not self._started:
                return None
            if waited_s > START_DEADLINE_S:
                raise TailraceError(
                    Kind.SPARK_FAILED,
                    f"start Spark: it was not ready after {START_DEADLINE_S:.0f} s",
                    "a first start may fetch jars over the network; without one, put Delta's jars into the "
                    "directory that TAILRACE_JARS names",
                )
        if start.error is not None:
            raise start.error
        session = self._spark.found
        if tag and session is not None:
            session.sparkContext.addJobTag(tag)
        return session

    def require_shared(self, folders: Mapping[str, Path]) -> None:
        """Check that executors see these folders as this process does. Called after `session`.

        :raises TailraceError: as `tailrace.spark.folders.require_shared`.
        """
        from tailrace.spark.folders import require_shared

        assert self._spark.found is not None
        require_shared(self._spark.found, folders)

    def cancel_jobs(self, tags: Iterable[str]) -> None:
        """Cancel Spark's jobs that have one of `tags`.

        The session may also run other tasks, captures on executors, and jobs of its owner. Sinks get an
        error, which is safe at any point.
        """
        session = self._spark.found
        if session is None:
            return
        try:
            for tag in tags:
                session.sparkContext.cancelJobsWithTag(tag)
        except Exception as error:  # noqa: BLE001 - a Spark that is gone runs no jobs
            log.warning("Spark's jobs could not be cancelled", error=str(as_failure(error)))

    def stop(self) -> None:
        """Stop Spark, within a deadline, and a starting session once it has started.

        A session that existed before is left running.
        """
        self._stopped.set()
        stopping = Background("spark-stop", self._spark.stop)
        stopping.start()
        if not stopping.join(STOP_DEADLINE_S):
            log.warning("Spark did not stop in time; the process ends without it")

    def _is_gone(self) -> bool:
        # Under the lock. A JVM that died fails every job after it; the sinks' next attempts need a new one.
        if not self._start.ended or self._start.error is not None:
            return self._start.ended
        if is_gone := self._spark.is_gone:
            log.warning("Spark's JVM is gone; starting it again")
        return is_gone

    def _begin(self) -> None:
        from tailrace.spark.session import warm

        found = self._spark.get(self._config.spark, self._config.name)
        if not self._stopped.is_set():
            warm(found)
