"""The source type Vitess: an implementation of `tailrace.sources.contract.Source`.

gRPC is imported when Vitess is first used: it belongs to an extra of the package.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.writer import LogListener
from tailrace.config import PipelineConfig
from tailrace.config.sections import LogConfig
from tailrace.config.source.section import SourceSection
from tailrace.config.source.vitess import VitessSource
from tailrace.errors import Kind, TailraceError
from tailrace.fair_semaphore import FairSemaphore
from tailrace.model import SourceFingerprint
from tailrace.sources.findings import Finding
from tailrace.sources.progress import SourceHealth, SourceLook
from tailrace.sources.vitess.snapshots import VitessSnapshots

if TYPE_CHECKING:
    from tailrace.sources.vitess.preflight import VitessCheck
    from tailrace.sources.vitess.streaming.capture_task import VitessCapture


class VitessSourceType:
    """The source type Vitess, which reads the VStream of vtgate."""

    settings: ClassVar[type[SourceSection]] = VitessSource

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[
            str, tuple[int, dict[str, str]]
        ] = {}  # by source, the transactions that were seen last, and when they were first seen

    def capture(
        self,
        section: VitessSource,
        log: Path,
        options: LogConfig,
        *,
        name: str,
        semaphore: FairSemaphore | None = None,
        listener: LogListener | None = None,
    ) -> VitessCapture:
        require_grpc()
        from tailrace.sources.vitess.streaming.capture_task import VitessCapture

        return VitessCapture(section, log, options, name=name, listener=listener)

    def end(self, section: VitessSource, stop: threading.Event) -> int:
        """Return the time at which the shards were first seen with the transactions that they have now.

        The log's positions are such times, too. The time doesn't change while nothing is committed.
        """
        require_grpc()
        from tailrace.sources.vitess.connection.metadata import newest_gtids
        from tailrace.sources.vitess.connection.vtgate import Vtgate

        with closing(Vtgate.connect(section)) as vtgate:
            asked_us = time.time_ns() // 1000
            gtids = newest_gtids(vtgate, section)
        with self._lock:
            before = self._ends.get(section.address)
            if before is None or before[1] != gtids:
                before = self._ends[section.address] = (asked_us, gtids)
            return before[0]

    def look(
        self, pipeline: PipelineConfig, directory: LogDirectory, timeout_s: float, stop: threading.Event
    ) -> SourceLook:
        require_grpc()
        from tailrace.sources.vitess.connection.metadata import newest_gtids
        from tailrace.sources.vitess.connection.vtgate import Vtgate

        source = cast(VitessSource, pipeline.source)
        hurried = source.model_copy(update={"connect_timeout": max(2.0, timeout_s)})
        with closing(Vtgate.connect(hurried)) as vtgate:
            gtids = newest_gtids(vtgate, hurried)
        shards = {shard: {"executed": gtid} for shard, gtid in gtids.items()}
        return SourceLook(None, SourceHealth("serving", None, {"vtgate": vtgate.address, "shards": shards}))

    def snapshots(self, log: Path) -> VitessSnapshots:
        return VitessSnapshots(log)

    def check(self, pipeline: PipelineConfig, directory: LogDirectory | None) -> VitessCheck:
        require_grpc()
        from tailrace.sources.vitess.preflight import VitessCheck

        return VitessCheck(cast(VitessSource, pipeline.source), directory)

    def findings_together(self, checks: Sequence[VitessCheck]) -> Iterator[Finding]:
        return iter(())

    def with_recovery(self, error: TailraceError, pipeline: PipelineConfig) -> TailraceError:
        return error

    def leftover_repair(self, source: SourceFingerprint) -> str:
        return ""  # vtgate keeps no state for its readers


def require_grpc() -> None:
    """Check that gRPC and protobuf are installed.

    :raises TailraceError: `ENVIRONMENT_UNFIT` if they are not.
    """
    for module, package in (("grpc", "grpcio"), ("google.protobuf", "protobuf")):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise TailraceError(
                Kind.ENVIRONMENT_UNFIT,
                f"use the source vitess: the package {package} is not installed",
                "pip install 'tailrace[vitess]'",
            )
