"""The real-time path of one consumer: drives both sides of `switching`, the buffer, markers and stored state.

The consumer calls `turn` before it reads, on the thread that sends. It takes blocks (`take_after`) while
`works` is true and reads the log otherwise. Another thread calls `keep` every second, which returns up to
where retention may remove the log, writes the marker for that, and reads commands.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from tailrace import failpoints
from tailrace.backoff import Backoff
from tailrace.changelog.directory import TASK, LogDirectory
from tailrace.changelog.format import HeldBlock
from tailrace.changelog.writer import Insertion
from tailrace.config.sections import RealtimeConfig
from tailrace.errors import Kind, TailraceError
from tailrace.realtime import control
from tailrace.realtime.buffer import BlockBuffer
from tailrace.realtime.control import KeptState, SwitchCommand
from tailrace.realtime.handover import Handover
from tailrace.realtime.switching import (
    LogEvent,
    LogMode,
    LogSide,
    RealtimeCommand,
    RealtimeEvent,
    RealtimeMode,
    RealtimeSide,
)

log = structlog.get_logger(__name__)

#: Capacity of the buffer, in segments, unless the configuration sets it in bytes.
HOT_SEGMENTS = 2
#: Shortest and longest wait after a fall-back before another attempt, in seconds.
RETURN_FIRST_S = 1.0
RETURN_LONGEST_S = 60.0

_E, _C, _M = RealtimeEvent, RealtimeCommand, RealtimeMode
_ANSWERS = {_C.MARK_START: _E.START_DURABLE, _C.MARK_STOP: _E.STOP_DURABLE}


@dataclass(frozen=True, slots=True)
class RealtimeView:
    """The current state of a consumer's real-time path.

    `because` is the reason for the last change of mode, `position` the log offset before which everything is
    handled. `lag_segments` is the number of segments that start after it; `lag_ms` is the age of the oldest
    change that waits in memory. Counters start with the process.
    """

    mode: RealtimeMode
    log_mode: LogMode
    wanted: bool
    because: str
    position: int
    buffer_blocks: int
    buffer_rows: int
    buffer_bytes: int
    buffer_capacity_bytes: int
    lag_segments: int = 0
    lag_ms: float = 0.0
    switches: int = 0
    fall_backs: int = 0
    restored_rows: int = 0


class RealtimePath:
    """The driver of the two sides of one consumer.

    :param consumer: its name among the log's registered readers.
    :param segment_bytes: size of the log's segments.
    """

    def __init__(self, consumer: str, config: RealtimeConfig, segment_bytes: int) -> None:
        self._consumer = consumer
        self._config = config
        self.buffer = BlockBuffer(config.buffer_bytes or HOT_SEGMENTS * segment_bytes)
        self._lock = threading.RLock()
        self._directory: LogDirectory | None = None
        self._handover: Handover | None = None
        self._side, self._log = RealtimeSide(), LogSide()
        self._todo: list[RealtimeCommand] = []
        self._awaited: tuple[RealtimeEvent, Insertion] | None = None
        self._marked: tuple[int, Insertion] | None = None  # of the last REALTIME that is not durable yet
        self._handled = 0
        self._command: SwitchCommand | None = None
        self._wanted = False
        self._begins_at_s = 0.0
        self._backoff = Backoff(first_s=RETURN_FIRST_S, longest_s=RETURN_LONGEST_S)
        self._because = ""
        self._since_s = 0.0
        self._fell_back = False  # and there was no command since
        self._restored = False
        self._switches = self._fall_backs = self._restored_rows = 0
        #: Number of segments that start after what is handled, as of the last `keep`.
        self.lag_segments = 0
        #: Increases with each switch between memory and the log.
        self.generation = 0

    def attach(self, handover: Handover | None) -> None:
        """Set the capture that feeds the path; None: there is none, as capture runs in another process."""
        with self._lock:
            self._handover = handover
            if handover is None:
                self._because = "capture runs in another process"

    def open(self, directory: LogDirectory, handled: int) -> None:
        """Start with the stored state. To be called before the first `turn`, and when the consumer went back.

        :param handled: the log offset before which everything is handled.
        :raises TailraceError: `LOG_CORRUPT`.
        """
        with self._lock:
            kept = control.kept(directory, self._consumer)
            self._directory, self._handled = directory, handled
            self._restored = kept.is_on
            self._side, todo = RealtimeSide.restored(kept.is_on, handled)
            self._log, self._todo = LogSide(position=handled), list(todo)
            self._awaited = self._marked = None
            self.buffer.drop()
            self.generation += 1
            self._command = control.command(directory, self._consumer)
            self._wanted = self._config.enabled if self._command is None else self._command.on
            if kept.waits_for_command(self._command) and not self._config.return_automatically:
                self._begins_at_s, self._fell_back = float("inf"), True
                self._because = "it fell back, and waits for a command"

    def leave(self, because: str) -> None:
        """Keep nothing in memory any more: the consumer has failed. `open` goes on as after a crash.

        :param because: for the view.
        """
        with self._lock:
            self._directory, self._side, self._todo = None, RealtimeSide(), []
            self._because = because
            self.buffer.drop()

    @property
    def works(self) -> bool:
        """Whether the consumer is fed from memory."""
        return self._side.state is _M.ON

    @property
    def read_from(self) -> int:
        """The log offset at which the log's side continues; everything before it is sent."""
        return self._log.read_from

    @property
    def reads_until(self) -> int | None:
        """The log offset at which the log's side must stop and call `turn` again; None: there is none."""
        return self._side.position if self._is_start_known else None

    def turn(self, sent: int, rows: int = 0) -> None:
        """Process the events and commands that are due. The caller sends nothing to the consumer meanwhile.

        :param sent: the log offset before which everything is sent.
        :param rows: number of changes sent since the start.
        :raises TailraceError: `LOG_WRITE_FAILED` if the state can't be stored.
        """
        if self.works and self._wanted and not self.buffer.lost:
            return
        with self._lock:
            if self._directory is None:
                return
            while self._obey(sent) and (event := self._next_event(sent)) is not None:
                self._step(event, sent, rows)

    def take_after(self, sent: int, held: Sequence[HeldBlock], bytes_max: int) -> Sequence[HeldBlock]:
        """Return the next blocks that end after `sent`, as `BlockBuffer.take`.

        :param held: the blocks of the previous call, if they were not sent completely.
        """
        while not (left := [block for block in held if block.header.end > sent]):
            if not (held := self.buffer.take(bytes_max)):
                return ()
        return left

    @property
    def durable_offset(self) -> int:
        """The log offset before which everything is durable; -1: no capture is running."""
        handover = self._handover
        return -1 if handover is None else handover.durable_offset

    @property
    def is_open(self) -> bool:
        """Whether `open` was called."""
        return self._directory is not None

    def keep(self, handled: int) -> int:
        """Record what is handled, as the consumer has stored it; return up to where the log may be removed.

        :raises TailraceError: `LOG_CORRUPT`.
        """
        with self._lock:
            self._handled = max(self._handled, handled)
            self._look_for_command()
            if self._log.state is LogMode.ACTIVE:
                self._log = self._log.step(LogEvent.HANDLED, handled)
            elif self.works and self._marked is None and handled > self._side.position:
                self._side, commands = self._side.step(_E.HANDLED, handled)
                assert commands == (_C.MARK_HANDLED,)
                failpoints.hit("realtime.before_mark_handled")
                if (insertion := self._insert(_C.MARK_HANDLED)) is not None:
                    self._marked = handled, insertion
            marked, handover = self._marked, self._handover
        if marked is not None and handover is not None:
            handover.sync()
            if 0 <= marked[1].end <= handover.durable_offset:
                failpoints.hit("realtime.handled_durable")
                with self._lock:
                    self._marked = None
                    self._log = self._log.step(LogEvent.REALTIME, marked[0])
        self._count_segments()
        return self._log.position

    def view(self) -> RealtimeView:
        """Return the current state of the path. Any thread."""
        buffer, side = self.buffer, self._side
        oldest_us = buffer.first_time_us
        return RealtimeView(
            mode=side.state,
            log_mode=self._log.state,
            wanted=self._wanted,
            because=self._because,
            position=self._handled,
            buffer_blocks=buffer.count,
            buffer_rows=buffer.rows,
            buffer_bytes=buffer.size_bytes,
            buffer_capacity_bytes=buffer.capacity_bytes,
            lag_segments=self.lag_segments,
            lag_ms=max(0.0, time.time_ns() / 1e6 - oldest_us / 1e3) if oldest_us else 0.0,
            switches=self._switches,
            fall_backs=self._fall_backs,
            restored_rows=self._restored_rows,
        )

    # The methods below must be called with the lock held.

    @property
    def _is_start_known(self) -> bool:
        return self._side.state is _M.STARTING and self._awaited is None and not self._todo

    def _next_event(self, sent: int) -> RealtimeEvent | None:
        state = self._side.state
        if state in (_M.STARTING, _M.ON) and self.buffer.lost:
            return _E.OVERFLOWED
        if state in (_M.STARTING, _M.ON) and not self._wanted:
            return _E.SWITCHED_OFF
        if self._awaited is not None:
            return self._durable_event(*self._awaited)
        if state is _M.OFF:
            is_open = self._handover is not None and self._handover.durable_offset >= 0
            due = self._wanted and time.monotonic() >= self._begins_at_s
            return _E.SWITCHED_ON if is_open and due else None
        if state is _M.STARTING and sent >= self._side.position:
            return _E.LOG_PASSIVE
        return None

    def _durable_event(self, event: RealtimeEvent, insertion: Insertion) -> RealtimeEvent | None:
        assert self._handover is not None
        if insertion.end < 0:
            return None  # within a long transaction, or the disk is full
        if self._handover.durable_offset < insertion.end:
            self._handover.sync()
        return event if self._handover.durable_offset >= insertion.end else None

    def _step(self, event: RealtimeEvent, sent: int, rows: int) -> None:
        log_offset = sent
        if event in _ANSWERS.values():
            assert self._awaited is not None
            log_offset = self._awaited[1].end
            self._awaited = None
            if event is _E.START_DURABLE:
                failpoints.hit("realtime.start_durable")
            else:
                failpoints.hit("realtime.stop_durable")
        if event is _E.LOG_PASSIVE:
            self._log = self._log.step(LogEvent.TRY_START_REALTIME)
            self._note_restored(rows)
        before = self._side
        self._side, commands = before.step(event, log_offset)
        self._todo += commands
        if self._side.state is not before.state:
            self._note_switch(event)

    def _obey(self, sent: int) -> bool:
        """Run the commands; return whether all were run: the others are repeated at the next turn."""
        while self._todo:
            command = self._todo[0]
            if command is _C.KEEP:
                if not self._keep():
                    return False
            elif command is _C.FILL:
                failpoints.hit("realtime.before_fill")
                self.buffer.fill()
            elif command is _C.DROP:
                failpoints.hit("realtime.before_drop")
                self.buffer.drop()
            elif command is _C.WORK:
                failpoints.hit("realtime.before_work")
                self.generation += 1
            elif command is _C.END_WORK:
                failpoints.hit("realtime.before_end_work")
                self.generation += 1
                self._step(_E.WORKER_ENDED, sent, 0)
            elif not self._mark(command):
                return False
            self._todo.pop(0)
        return True

    def _keep(self) -> bool:
        assert self._directory is not None
        failpoints.hit("realtime.before_keep")
        is_on = self._side.is_kept_on
        command_us = 0 if self._command is None else self._command.time_us
        kept = KeptState(is_on, self._side.position, not is_on and self._fell_back, command_us)
        try:
            control.keep(self._directory, self._consumer, kept)
        except TailraceError as error:
            if error.kind is not Kind.LOG_FULL:
                raise
            return False
        failpoints.hit("realtime.after_keep")
        return True

    def _mark(self, command: RealtimeCommand) -> bool:
        if command is _C.MARK_STOP:
            failpoints.hit("realtime.before_mark_stop")
        else:
            failpoints.hit("realtime.before_mark_start")
        if command is _C.MARK_STOP and self._log.state is LogMode.PASSIVE:
            # The log's side does not wait until the marker is durable: a start after a crash writes it again.
            self._log = self._log.step(LogEvent.STOP_REALTIME, self._side.position)
        insertion = self._insert(command)
        if insertion is None:
            return False
        self._awaited = _ANSWERS[command], insertion
        return True

    def _insert(self, command: RealtimeCommand) -> Insertion | None:
        marker = self._side.marker(command, self._consumer)
        insertion = Insertion(marker.frame, rolls=command is _C.MARK_START)
        is_taken = self._handover is not None and self._handover.insert(insertion)
        return insertion if is_taken else None

    def _note_switch(self, event: RealtimeEvent) -> None:
        state = self._side.state
        if event is not _E.STOP_DURABLE and event is not _E.WORKER_ENDED:
            self._because = self.buffer.lost if event is _E.OVERFLOWED else str(event)
        self._switches += 1
        now_s = time.monotonic()
        if event is _E.OVERFLOWED:
            self._fall_back(now_s)
        if state is _M.ON:
            self._since_s = now_s
        log.info(
            "real time", consumer=self._consumer, mode=str(state), because=self._because,
            log_offset=self._side.position, buffer_bytes=self.buffer.size_bytes,
        )  # fmt: skip

    def _fall_back(self, now_s: float) -> None:
        self._fall_backs += 1
        self._fell_back = True
        if self._since_s and now_s - self._since_s > self._backoff.wait_s:
            self._backoff = self._backoff.after_success()  # it was on for longer than the next wait
        self._since_s = 0.0
        wait_s = self._backoff.wait_s if self._config.return_automatically else float("inf")
        self._backoff, self._begins_at_s = self._backoff.failed(), now_s + wait_s
        log.warning(
            "real time can't go on: the log takes over",
            consumer=self._consumer,
            because=self.buffer.lost,
            capacity_bytes=self.buffer.capacity_bytes,
            tried_again_after_s=wait_s if self._config.return_automatically else None,
        )

    def _note_restored(self, rows: int) -> None:
        if self._restored:
            self._restored, self._restored_rows = False, rows
            log.info("real time is restored", consumer=self._consumer, rows=rows)

    def _look_for_command(self) -> None:
        if self._directory is None:
            return
        command = control.command(self._directory, self._consumer)
        if command is not None and command != self._command:
            self._command, self._wanted, self._fell_back = command, command.on, False
            self._begins_at_s, self._backoff = 0.0, self._backoff.after_success()

    def _count_segments(self) -> None:
        if self._directory is not None:
            segments = self._directory.segments(TASK)
            self.lag_segments = sum(offset > self._handled for offset in segments)
