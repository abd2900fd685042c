"""Captures all shards of a keyspace, divided among tasks, into one log.

`KeyspaceStream._work` is the main loop: take the received responses, transcode them to frames, append these
with the states that they lead to, and carry out the coordinator's commands. One append is one block of the
log, which after a crash exists completely or not at all; so do its rows and its shard's position.

Each task has a connection and a thread. The tasks take turns at the log and at the data that belongs to it:
tables, states, the coordinator. So there is one order, whichever tasks read the shards.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np
from google.protobuf.message import DecodeError

from tailrace import failpoints
from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.writer import Tail
from tailrace.config.source.vitess import VitessSource
from tailrace.errors import Kind, TailraceError
from tailrace.fair_semaphore import FairSemaphore
from tailrace.protocol import frames, metadata_frames
from tailrace.protocol.frames import Bytes
from tailrace.sources.appender import SYNC_DEADLINE_S, Appender
from tailrace.sources.progress import SourceHealth
from tailrace.sources.vitess.connection.errors import DISCONNECTED, from_status
from tailrace.sources.vitess.connection.metadata import serving_shards, views
from tailrace.sources.vitess.connection.vtgate import Vtgate
from tailrace.sources.vitess.resharding.coordinator import Coordinator
from tailrace.sources.vitess.resharding.events import (
    CancelStream,
    ChunkReached,
    Command,
    EndReason,
    Event,
    JournalReached,
    Keep,
    ListShards,
    OpenStream,
    ShardsListed,
    ShardsServing,
    ShardStreamEnded,
)
from tailrace.sources.vitess.resharding.key_ranges import overlapping
from tailrace.sources.vitess.resharding.shard_state import ShardState
from tailrace.sources.vitess.rows.change_filters import AmbiguousError, RepeatedChangeFilter
from tailrace.sources.vitess.rows.column_defaults import asked_by
from tailrace.sources.vitess.rows.copy_keys import common_key
from tailrace.sources.vitess.rows.tables import LogTables
from tailrace.sources.vitess.rows.transcoder import Transcoder
from tailrace.sources.vitess.streaming.asked_snapshots import AskedSnapshots
from tailrace.sources.vitess.streaming.awaited_end import AwaitedEnd, EndQuestion
from tailrace.sources.vitess.streaming.one_stream_copies import OneStreamCopy
from tailrace.sources.vitess.streaming.serving_shards import ServingShards
from tailrace.sources.vitess.streaming.shard_copies import ChunkStream, ShardCopies
from tailrace.sources.vitess.streaming.shard_health import ShardProgress, health_of, watermark_us
from tailrace.sources.vitess.streaming.shard_streams import BYTES_MAX, ShardResponses, ShardStreams
from tailrace.sources.vitess.streaming.silent_shards import SilentShards
from tailrace.sources.vitess.streaming.stream_events import (
    chunk_events_of,
    events_of,
    found_no_table,
    stream_ended,
)
from tailrace.sources.vitess.streaming.stream_requests import chunk_request, stream_request

#: Longest wait of the loop for a response, in seconds.
TAKE_S = 0.2
#: Least time between two appends, in seconds: transactions received meanwhile share an append and its fsync.
APPEND_INTERVAL_S = 0.002
#: Numbers of responses, or of bytes, taken at once that mean a backlog, and the append interval then.
BACKLOG_RESPONSES, BACKLOG_BYTES, BACKLOG_INTERVAL_S = 32, 32 << 10, 0.02
#: Size in bytes from which the received part of a transaction is appended before the transaction ends.
OPEN_BYTES_MAX = 32 << 20
#: Greatest age of the watermark in rows, in microseconds: computing it visits each shard.
WATERMARK_INTERVAL_US = 200_000
#: Longest time until a position that came without rows is written, in seconds; rows take it along before.
IDLE_STATE_S = 1.0
#: Interval of the check for shards that are silent or no longer serve, in seconds.
LOOK_S = 0.25


@dataclass(slots=True)
class _Task:
    """A worker that reads shards. It has no state of a shard: any other task can take over its shards.

    :ivar held: responses that it took while the log was inside the transaction of another shard.
    """

    number: int
    vtgate: Vtgate
    streams: ShardStreams
    held: list[tuple[str, ShardResponses]] = field(default_factory=list)


def _now_us() -> int:
    return time.time_ns() // 1000


class KeyspaceStream:
    """The capture of one keyspace. Call `run` once; `health`, `want` and `has_reached` from any thread.

    :param vtgates: a connection for each task; the first one is also used for queries.
    """

    def __init__(
        self,
        source: VitessSource,
        vtgates: Sequence[Vtgate],
        appender: Appender,
        stopping: threading.Event,
        directory: LogDirectory,
    ) -> None:
        self._source = source
        vtgate = self._vtgate = vtgates[0]
        self._appender = appender
        self._stopping = stopping
        kept = metadata_frames.shard_states(appender.schema_in_force)
        prefix = self._prefix = f"{source.keyspace}/"  # precedes a shard's name in the log
        states = {name.removeprefix(prefix): ShardState.from_json(state) for name, state in kept.items()}
        self.coordinator = Coordinator(
            states, range(len(vtgates)), copies=source.snapshot == "initial", common_key=common_key
        )
        self._tasks = [
            _Task(number, each, ShardStreams(each, source.receive_timeout_s, BYTES_MAX // len(vtgates)))
            for number, each in enumerate(vtgates)
        ]
        self._turns = FairSemaphore(1)  # guards the attributes below, and the log
        self._over = threading.Event()
        self._failure: BaseException | None = None
        ask = asked_by(vtgate.query, source.keyspace, source.tablet_type, self._serving_keys_of)
        self._tables = LogTables(appender.schema_in_force, ask, source.shard_column or "")
        self.snapshots = AskedSnapshots(
            directory, source, vtgate, appender, self._tables, self.coordinator, self._step
        )  # fmt: skip
        self._copies = ShardCopies(
            source, vtgate, self.coordinator, self._step, self._start_chunk, self._stop_copy, self._start,
        )  # fmt: skip
        # By the stream's name: the one stream of a shard has the shard's name.
        self._transcoders: dict[str, Transcoder] = {}
        self._filters: dict[str, RepeatedChangeFilter] = {}
        self._serving = ServingShards(source, vtgate)
        self._open_stream: str | None = None  # whose transaction is open at the log's end
        self._open_position = 0
        self.shards: dict[str, ShardProgress] = {}
        self._silent = SilentShards(source, vtgate, self.coordinator, self.shards, self._step, _now_us)
        self._written = dict(states)
        self._idle: dict[str, ShardState] = {}  # states that came without rows and are not written yet
        self._idle_since_s = 0.0
        self._list_at_s: float | None = None
        self._targets: list[AwaitedEnd] = []
        self._reached = Tail(0, 0, 0)  # at `offset`, the log has all that was wanted up to `position`
        self._ends = EndQuestion(source, vtgate)
        self._watermark = self._watermark_at_us = 0
        self._looked_s = 0.0

    def run(self) -> None:
        """Stream until a stop is requested.

        :raises TailraceError: if the connection is lost, or the user must act.
        """
        threads = [
            threading.Thread(
                target=self._work, args=(task,), name=f"tailrace-vitess-{task.number}", daemon=True
            )
            for task in self._tasks[1:]
        ]
        try:
            self._carry_out(self.coordinator.start())
            for thread in threads:
                thread.start()
            self._work(self._tasks[0])
            self._end_of(threads)
            if self._failure is not None:
                raise self._failure
            if self._open_stream is None:
                self._write_idle()
            self._appender.sync()
        finally:
            self._end_of(threads)
            for task in self._tasks:
                task.streams.close()

    def _end_of(self, threads: Iterable[threading.Thread]) -> None:
        """Stop the tasks' threads, and wait until none uses the log any more."""
        self._over.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join(SYNC_DEADLINE_S)

    def _work(self, task: _Task) -> None:
        """Append what a task receives to the log, until all tasks end. Runs on the task's thread."""
        try:
            while not self._stopping.is_set() and not self._over.is_set():
                began_s = time.monotonic()
                received = task.streams.take(TAKE_S, self._open_stream)
                with self._turns.turn(self._over) as is_given:
                    if is_given:
                        self._turn(task, received)
                if received:
                    time.sleep(max(0.0, _interval_s(received) - (time.monotonic() - began_s)))
        except BaseException as error:  # noqa: BLE001 - raised again on the thread of `run`
            self._failure = self._failure or error
            self._over.set()

    def _turn(self, task: _Task, received: Mapping[str, ShardResponses]) -> None:
        try:
            held, task.held = task.held, []
            for stream, responses in (*held, *received.items()):
                if self._open_stream in {None, stream}:
                    self._take(stream, responses)
                else:
                    task.held.append((stream, responses))
            if self._open_stream is not None:
                self._look_at_open(self._open_stream, time.monotonic())
            elif task is self._tasks[0]:
                self._look_after(time.monotonic())
        except BaseException:
            self._over.set()  # tables may be ahead of the log: no task gets another turn
            raise

    def want(self, position: int) -> None:
        """Move the log's position to `position` once the log has everything that the shards have now."""
        self._ends.want(position)

    def has_reached(self, position: int, durable: int) -> bool:
        """Return whether the log up to the log offset `durable` has what `want` requested for `position`.

        Comparing positions is not enough: they are times, and earlier frames may have later ones.
        """
        reached = self._reached
        return position <= reached.position and reached.offset <= durable

    @property
    def waiting_bytes(self) -> int:
        """Number of bytes that were received and are not in the log."""
        return sum(task.streams.waiting_bytes for task in self._tasks)

    def health(self) -> SourceHealth:
        """Return the state of each shard, and the time up to which all shards are in the log."""
        tasks = {str(task.number): task.vtgate.address for task in self._tasks}
        return health_of(self.coordinator.shards, self.shards, tasks)

    # Received responses

    def _take(self, stream: str, received: ShardResponses) -> None:
        if received.responses and self._accepts(stream, received):
            self._transcode(stream, received)
        if received.ended is not None and self._accepts(stream, received):
            shard = self._shard_of(stream)
            if received.ended.code == DISCONNECTED or self._open_stream == stream:
                # The open transaction is discarded from the log, and all streams start again.
                raise from_status(received.ended, f"stream the shard {shard}", shard)
            self._copies.end(shard)
            if found_no_table(received.ended):
                self._copies.note_without_tables(shard)
            self._step(stream_ended(shard, received.attempt, received.ended))

    def _shard_of(self, stream: str) -> str:
        copied = self._copies.streams.get(stream)
        return stream if copied is None else copied.shard

    def _accepts(self, stream: str, received: ShardResponses) -> bool:
        """Return whether the stream is current: not that of a finished chunk or of an earlier attempt."""
        copied = self._copies.streams.get(stream)
        if copied is not None and copied.attempt != received.attempt:
            return False
        return self.coordinator.accepts(self._shard_of(stream), received.attempt)

    def _left_of(self, stream: str, received: ShardResponses) -> list[bytes]:
        """Return the responses without the changes that the log already has or another stream delivers."""
        copied = self._copies.streams.get(stream) or self._copies.ones.get(stream)
        if copied is None and stream not in self._filters:
            return received.responses
        try:
            if copied is not None:
                return copied.left_of(received.responses)
            chosen = self._filters[stream]
            found = chosen.left_of(received.responses)
        except AmbiguousError:
            self._give_up(stream, received.attempt)
        except DecodeError:
            return received.responses  # the transcoder reports the error in them
        if chosen.is_over:
            del self._filters[stream]
        return found

    def _give_up(self, stream: str, attempt: int) -> NoReturn:
        shard = self._shard_of(stream)
        message = f"stream the shard {shard} after its copy: which changes the log already has is not known"
        self._lose(shard, attempt, EndReason.AMBIGUOUS, TailraceError(Kind.SOURCE_UNREACHABLE, message))

    def _transcode(self, stream: str, received: ShardResponses) -> None:
        """Append the responses of a shard's stream to the log, with the states that they lead to."""
        shard = self._shard_of(stream)
        responses = self._left_of(stream, received)
        transcoder = self._transcoders[stream]
        now_us = _now_us()
        if now_us - self._watermark_at_us > WATERMARK_INTERVAL_US:
            self._watermark_at_us = now_us
            self._watermark = watermark_us(self.coordinator.shards, self.shards)
        transcoder.set_watermark(self._watermark)
        is_open = self._open_stream == stream
        position = self._open_position if is_open else max(self._appender.tail.position, now_us)
        try:
            made = transcoder.transcode(responses, position, cut=is_open, time_us=now_us)
            if transcoder.kept_bytes > OPEN_BYTES_MAX and not len(made.frames):
                # Too large for memory: it is appended as it comes, and nothing else is until its end.
                self._write_idle()
                made = transcoder.transcode([], position, cut=True, time_us=now_us)
        except TailraceError as error:
            reason = _LOST_BY.get(error.kind)
            if reason is not None and "shard" in error.context:  # errors of queries have none
                self._lose(shard, received.attempt, reason, error)
            raise
        self._open_stream, self._open_position = (stream, made.position) if made.is_open else (None, 0)
        if made.is_open:
            if len(made.frames):  # else there were only heartbeats
                self.shards[shard].move(is_further=False)
                self._appender.append(made.frames)
            return
        commands: list[Command] = []
        end = len(made.frames)
        copied = self._copies.streams.get(stream)
        events: Iterable[tuple[Event, int]]
        if copied is None:
            is_copied = self.coordinator.shards[shard].kept.copy is not None
            known = self.shards[shard]
            events = events_of(shard, received.attempt, made, known, is_copied=is_copied)
        else:
            events = ((event, end) for event in chunk_events_of(copied, made))
            self.shards[shard].move(is_further=made.rows > 0)
        is_done = False
        # First: a journal among the events ends what the shard still notes.
        described = transcoder.take_streamed()
        if copied is None and (named := self._copies.streamed(shard, received.attempt, described)):
            commands += self.coordinator.step(named)
        for event, at in events:
            commands += self.coordinator.step(event)
            end = at if isinstance(event, JournalReached) else end
            is_done = is_done or (isinstance(event, ChunkReached) and event.is_done)
        if end:
            self._write(stream, made.frames[:end], made.position, commands)
        self._carry_out(commands)
        if copied is not None:
            self._copies.go_on(copied, is_done=is_done)
        else:
            self._copies.go_on_with_one(shard)

    def _lose(self, shard: str, attempt: int, reason: EndReason, error: TailraceError) -> NoReturn:
        """Write to the log that a shard's stream can't continue, and discard an open transaction. All streams
        start again: tables may be ahead of the log.
        """
        self._appender.discard_open_unit()
        failpoints.hit("vitess.after_discard")
        self._open_stream, self._open_position = None, 0
        trouble = f"{error.message.partition(': ')[2]}; {error.hint}"
        self._step(ShardStreamEnded(shard, attempt, reason, (), trouble))
        raise TailraceError(Kind.SOURCE_UNREACHABLE, error.message, error.hint, error.context) from error

    # Commands

    def _step(self, event: Event) -> None:
        self._carry_out(self.coordinator.step(event))

    def _carry_out(self, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case Keep():
                    self._keep(command.states)
                case OpenStream():
                    self._open(command)
                case CancelStream():
                    self._copies.end(command.shard)
                    self._tasks[command.task].streams.stop(command.shard, command.attempt)
                case ListShards():
                    self._list_at_s = time.monotonic() + command.wait_s

    def _open(self, command: OpenStream) -> None:
        shard = command.shard
        self._keep_shards()
        before = self.shards.get(shard, ShardProgress())
        self.shards[shard] = ShardProgress(probed_s=before.probed_s, stalls=before.stalls)
        self._copies.end(shard)
        if self._copies.takes(command):
            self._copies.open(command)
        else:
            self._start(command)

    def _keep_shards(self) -> None:
        shards = dict(self.coordinator.shards)
        live = {name for name, known in shards.items() if not known.kept.children}
        # While a shard's streams are at several positions, its tables are not known yet.
        live |= {f"{name} copied" for name, known in shards.items() if _is_apart(known.kept)}
        self._tables.keep_shards(live)

    def _transcoder(self, shard: str) -> Transcoder:
        return Transcoder(
            self._source.keyspace,
            shard,
            self._tables,
            _beside_position(self.coordinator.shards[shard].kept),
            captures=functools.partial(self._source.captures, self._source.keyspace),
            left_out=self._source.disclosure.left_out,
            is_view=self._is_view_of(shard),
        )

    def _is_view_of(self, shard: str) -> Callable[[str], bool]:
        @functools.cache
        def found() -> frozenset[str]:
            # A shard that doesn't serve answers no query: the shards that took over have the same views.
            others = self._serving_keys_of(shard) or (shard,)
            return views(self._vtgate, self._source, shard if shard in others else others[0])

        return lambda table: table in found()

    def _start_chunk(self, stream: ChunkStream) -> None:
        self._transcoders[stream.name] = self._transcoder(stream.shard)
        request = chunk_request(self._source, stream.shard, stream.chunk)
        self._tasks[stream.task].streams.start(stream.name, stream.attempt, request)

    def _stop_copy(self, stream: ChunkStream | OneStreamCopy) -> None:
        self._tasks[stream.task].streams.stop(stream.name, stream.attempt)
        self._transcoders.pop(stream.name, None)

    def _start(self, command: OpenStream) -> None:
        """Open the one stream of a shard."""
        shard = command.shard
        self._transcoders[shard] = self._transcoder(shard)
        self._filters.pop(shard, None)
        if ahead := self.coordinator.shards[shard].kept.ahead:
            try:
                self._filters[shard] = RepeatedChangeFilter(self._source.keyspace, shard, ahead)
            except AmbiguousError:
                self._give_up(shard, command.attempt)
        self._copies.watch(command)
        request = stream_request(self._source, command)
        self._tasks[command.task].streams.start(
            shard, command.attempt, request, wait_s=command.wait_s, deadline_s=command.deadline_s
        )

    def _keep(self, states: Mapping[str, ShardState]) -> None:
        """Write states that came without rows: at once if more than a position changed, else later."""
        if not self._idle:
            self._idle_since_s = time.monotonic()
        self._idle.update(states)
        if any(self._is_more(shard, state) for shard, state in states.items()):
            self._write_idle()

    def _write(self, stream: str, made: Bytes, position: int, commands: list[Command]) -> None:
        """Append frames of complete transactions together with the states that they lead to.

        :param position: the next transaction's position.
        """
        shard = self._shard_of(stream)
        states = {name: state for name, state in self._idle.items() if name != shard}
        self._idle.clear()
        for command in commands:
            if isinstance(command, Keep):
                states.update(command.states)
        commands[:] = [command for command in commands if not isinstance(command, Keep)]
        own = states.get(shard)
        if own is not None and not self._is_more(shard, own):
            # The frames contain the position, unless the shard advanced without rows of our tables.
            self._written[shard] = own
            if not self._transcoders[stream].has_unwritten_position:
                del states[shard]
        self._append(made, position, states)

    def _write_idle(self) -> None:
        if self._idle:
            states, self._idle = self._idle, {}
            self._append(_NO_FRAMES, 0, states)

    def _append(self, made: Bytes, position: int, states: Mapping[str, ShardState]) -> None:
        if states:
            now_us = _now_us()
            at = max(self._appender.tail.position, now_us, position)
            kept = {self._prefix + shard: state.as_json() for shard, state in states.items()}
            texts = [frames.shard_frame(name, state) for name, state in kept.items()]
            texts.append(frames.control_frame(frames.PROGRESS, at, now_us, {}))
            made = np.concatenate((made, np.frombuffer(b"".join(texts), np.uint8)))
            for shard, state in states.items():
                if self._is_more(shard, state):
                    self._set_shard_state(shard, state)
            self._written.update(states)
        self._appender.append(made)

    def _set_shard_state(self, shard: str, state: ShardState) -> None:
        """Set a shard's new state in the transcoders that write it into the shard's frames."""
        beside = _beside_position(state)
        for name in (shard, *(stream.name for stream in self._copies.of(shard))):
            if name in self._transcoders:
                self._transcoders[name].set_state(beside)
        if _is_apart(self._written.get(shard, _NOTHING)) and not _is_apart(state):
            self._keep_shards()

    def _is_more(self, shard: str, state: ShardState) -> bool:
        """Return whether more than the position differs from the shard's state in the log."""
        return replace(state, gtid="") != replace(self._written.get(shard, _NOTHING), gtid="")

    # Periodic work

    def _look_at_open(self, stream: str, now_s: float) -> None:
        """Fail if an open transaction gets no more data: all shards wait for its end."""
        shard = self._shard_of(stream)
        if now_s - self.shards[shard].moved_s > self._source.receive_timeout_s:
            raise TailraceError(
                Kind.SOURCE_UNREACHABLE,
                f"stream the shard {shard}: no more data of an open transaction was received for "
                f"{self._source.receive_timeout_s:g} s",
                "it is retried from before the transaction; if it persists, raise source.receive_timeout_s",
                {"shard": shard},
            )

    def _look_after(self, now_s: float) -> None:
        self._appender.raise_failure()
        if self._list_at_s is not None and now_s >= self._list_at_s:
            self._list_shards()
        if self._idle and now_s - self._idle_since_s > IDLE_STATE_S:
            self._write_idle()
        if now_s - self._looked_s > LOOK_S:  # takes a millisecond for a thousand shards
            self._looked_s = now_s
            serving = self._serving.turn(now_s, is_any_new=self.coordinator.has_new_shards)
            if serving is not None:
                self._step(ShardsServing(serving))
            self._silent.turn(now_s)
        self._copies.turn(now_s)
        self.snapshots.turn(now_s)
        self._look_for_targets(now_s)

    def _serving_keys_of(self, shard: str) -> tuple[str, ...]:
        return overlapping(shard, serving_shards(self._vtgate, self._source))

    def _list_shards(self) -> None:
        self._list_at_s = None
        shards = serving_shards(self._vtgate, self._source)
        self._step(ShardsListed(shards))

    def _look_for_targets(self, now_s: float) -> None:
        """Move the log's position to each wanted one whose shards' ends the log has reached."""
        if (end := self._ends.turn(now_s)) is not None:
            for shard, gtids in end.read.items():
                self._silent.doubt_if_behind(shard, gtids)
            self._targets.append(end)
        if not self._targets or not self.snapshots.is_idle:
            return
        for target in list(self._targets):
            if missing := target.missing(self.coordinator):
                target.refuse_if_lost(self.coordinator, missing)
                continue
            self._targets.remove(target)
            self._write_idle()
            self._appender.append_progress(max(target.position, self._appender.tail.position))
            position = max(self._reached.position, target.position)
            self._reached = replace(self._appender.tail, position=position)


def _interval_s(received: Mapping[str, ShardResponses]) -> float:
    count = sum(len(each.responses) for each in received.values())
    size = sum(each.size for each in received.values())
    return BACKLOG_INTERVAL_S if count >= BACKLOG_RESPONSES or size >= BACKLOG_BYTES else APPEND_INTERVAL_S


#: Errors of rows that concern their shard alone: the others continue.
_LOST_BY = {
    Kind.SCHEMA_CHANGED: EndReason.UNNAMED,
    Kind.SOURCE_MISCONFIGURED: EndReason.UNREADABLE,
}

_NOTHING = ShardState()
_NO_FRAMES = np.empty(0, np.uint8)


def _beside_position(state: ShardState) -> dict[str, Any]:
    return {name: value for name, value in state.as_json().items() if name != "gtid"}


def _is_apart(state: ShardState) -> bool:
    """Return whether the log has parts of the shard up to different positions."""
    return bool(state.ahead) or (state.copy is not None and bool(state.copy.chunks))
