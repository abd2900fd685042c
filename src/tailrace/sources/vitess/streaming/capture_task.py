"""The capture task of a keyspace: captures all of its shards into one task of the change log.

`VitessCapture.run` connects, streams, and reconnects after any error that can be retried. Each shard has a
thread that receives; the thread that calls `run` appends, in turn with the threads of the source's other
tasks; the appender's thread makes durable. vtgate needs no acknowledgement: the next start continues after
what is durable in the log.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

from tailrace.changelog.directory import TASK, LogDirectory
from tailrace.changelog.disclosure import keep_disclosure, keep_renames, kept_disclosure
from tailrace.changelog.writer import LogListener, LogOptions, LogWriter, Tail
from tailrace.config.sections import LogConfig
from tailrace.config.source.vitess import VitessSource
from tailrace.errors import Kind, Stopped, TailraceError
from tailrace.model import SourceFingerprint
from tailrace.protocol.renames import Renames
from tailrace.sources.appender import Appender
from tailrace.sources.progress import CaptureProgress, PhaseName, SourceHealth, SourceWarning
from tailrace.sources.reconnection import Reconnection
from tailrace.sources.vitess.column_checks import require_columns
from tailrace.sources.vitess.connection.metadata import serving_shards
from tailrace.sources.vitess.connection.vtgate import Vtgate
from tailrace.sources.vitess.resharding.coordinator import Coordinator
from tailrace.sources.vitess.resharding.refusals import FAILURES_TOLD
from tailrace.sources.vitess.resharding.transitions import ShardMode
from tailrace.sources.vitess.streaming.keyspace_stream import KeyspaceStream
from tailrace.sources.vitess.streaming.shard_health import ShardProgress


class VitessCapture:
    """The capture of one keyspace into one log. Call `run` once; the rest from any thread.

    :param path: the log's directory; it is created if it doesn't exist.
    :param name: the pipeline's name, for messages.
    :param listener: the listener of the log's writer.
    """

    def __init__(
        self,
        source: VitessSource,
        path: Path,
        log_config: LogConfig,
        *,
        name: str,
        listener: LogListener | None = None,
    ) -> None:
        self._source = source
        self._path = path
        self._options = LogOptions(segment_bytes=log_config.segment_bytes, compression=log_config.compression)
        self._listener = listener
        self._stopping = threading.Event()
        self._appender: Appender | None = None
        self._directory: LogDirectory | None = None
        self._stream: KeyspaceStream | None = None
        self._phase: PhaseName = "connecting"
        self._connections = Reconnection(
            source,
            self._stopping,
            name=name,
            position=self._position,
            is_heard=lambda: self._phase == "streaming",
        )
        self._hosts_tried = 0
        self._lock = threading.Lock()
        self._wanted = 0

    def run(self) -> None:
        """Capture until `stop`.

        :raises TailraceError: if the user must act, or an error persisted for `source.reconnect_s_max`
            seconds.
        """
        try:
            self._connections.run(self._run_connection)
        except Stopped:
            pass
        finally:
            self._phase = "stopped"
            if self._appender is not None:
                self._appender.close()

    def stop(self) -> None:
        """Ask `run` to return, after it has made durable what was received."""
        self._stopping.set()

    def caught_up(self, position: int) -> bool:
        """Return whether everything that the shards had committed when `position` was first passed is durable
        in the log.

        If this is not known yet, a request to the shards is sent: call again.
        """
        with self._lock:
            is_new = position > self._wanted
            self._wanted = max(self._wanted, position)
            stream = self._stream
        if stream is not None and is_new:
            stream.want(position)
        appender = self._appender
        if appender is None or stream is None:
            return False
        return stream.has_reached(position, appender.durable.offset)

    def progress(self) -> CaptureProgress:
        """Return the task's progress."""
        appender, stream = self._appender, self._stream
        tail = Tail(0, 0, 0) if appender is None else appender.tail
        durable = Tail(0, 0, 0) if appender is None else appender.durable
        waiting = appender is not None and appender.waiting_for_disk and self._phase != "stopped"
        # Vitess has no number to compare with the log's positions: the end is estimated by received bytes.
        source_end = tail.position + (stream.waiting_bytes if stream else 0)
        return CaptureProgress(
            phase="waiting_for_disk" if waiting else self._phase,
            rows=appender.rows if appender else 0,
            bytes=appender.bytes if appender else 0,
            appended=tail,
            durable=durable,
            source_end=source_end,
            acknowledged=durable.position,
            snapshot={},
            reconnects=self._connections.count,
            error=self._connections.error,
            health=self._health(),
            warnings=()
            if stream is None
            else (*shard_warnings(stream.coordinator, stream.shards), *stream.snapshots.warnings),
        )

    def _health(self) -> SourceHealth | None:
        stream = self._stream
        return None if stream is None else stream.health()

    def _open_log(self) -> Appender:
        if self._appender is not None:
            return self._appender
        self._require_keyspace()
        fingerprint = SourceFingerprint("vitess", self._source.keyspace, self._source.keyspace, "")
        directory = self._directory = LogDirectory.create_or_open(self._path, fingerprint)
        writer = LogWriter.open(directory, TASK, options=self._options, listener=self._listener)
        self._appender = Appender(writer, self._stopping)
        self._appender.start()
        return self._appender

    def _require_keyspace(self) -> None:
        """Check that the keyspace serves before a log is created for it: no other one could use that log.

        :raises TailraceError: as `Vtgate.connect` and `serving_shards`.
        """
        try:
            LogDirectory.open(self._path)
        except TailraceError as error:
            if error.kind is not Kind.LOG_MISSING:
                raise
            with closing(Vtgate.connect(self._source)) as vtgate:
                serving_shards(vtgate, self._source)

    def _run_connection(self) -> None:
        self._phase = "connecting"
        appender = self._open_log()
        assert self._directory is not None
        appender.check_fence()
        appender.discard_open_unit()
        with ExitStack() as stack:
            vtgates = Vtgate.connect_each(self._source, self._source.tasks_max, self._hosts_tried)
            for vtgate in vtgates:
                stack.enter_context(closing(vtgate))
            if self._stream is None:
                self._keep_policy(self._directory, vtgates[0])
            # The next connection starts with another host.
            self._hosts_tried = self._source.hosts.index(vtgates[0].address) + 1
            stream = KeyspaceStream(self._source, vtgates, appender, self._stopping, self._directory)
            with self._lock:
                self._stream = stream
                stream.want(self._wanted)
            self._phase, self._connections.error = "streaming", None
            stream.run()

    def _keep_policy(self, directory: LogDirectory, vtgate: Vtgate) -> None:
        """Store the column policy for the readers of the log, which wait for it.

        :raises TailraceError: `CONFIG_INVALID` if a pattern matches no column.
        """
        require_columns(vtgate, self._source, kept_disclosure(directory, TASK))
        keep_renames(directory, TASK, Renames())  # columns are known by their names alone
        keep_disclosure(directory, TASK, self._source.disclosure)

    def _position(self) -> int:
        return self._appender.tail.position if self._appender is not None else 0


def shard_warnings(
    coordinator: Coordinator, progress: Mapping[str, ShardProgress]
) -> Iterator[SourceWarning]:
    """Yield a warning for each shard that has one. Any thread."""
    for name, shard in sorted(dict(coordinator.shards).items()):
        if shard.state is ShardMode.NEEDS_SNAPSHOT:
            yield SourceWarning(
                f"shard_needs_snapshot {name}",
                f"the stream of the shard {name} can't continue: {shard.kept.lost}",
                "its changes are not captured until its keys are copied again: tailrace snapshot FILE --lost",
            )
        elif shard.trouble and shard.failures >= FAILURES_TOLD:
            yield SourceWarning(
                f"shard_delayed {name}",
                f"the shard {name} is delayed: {shard.trouble}",
                "it is retried",
            )
        elif name in progress and progress[name].lags:
            yield SourceWarning(
                f"shard_delayed {name}",
                f"the shard {name} is delayed: its replica lacks transactions that its primary has",
                "check the replication of the tablets of source.tablet_type",
            )
        elif shard.state is ShardMode.AT_JOURNAL and (journal := shard.kept.journal) is not None:
            others = [other for other in journal.participants if not coordinator.is_at(other, journal)]
            yield SourceWarning(
                f"shard_waits {name}", f"the shard {name} is at a reshard, and waits for {', '.join(others)}"
            )
