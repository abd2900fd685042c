"""The progress display of a running pipeline: a live table on a terminal, periodic lines elsewhere.

Everything shown is derived from the engine's views; `Pace` is the pure part: the rates over the last
seconds and the estimates of the remaining time.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tailrace.errors import printable
from tailrace.pipeline.status.views import (
    CaptureView,
    PipelineState,
    PipelineView,
    SinkView,
    SourceView,
    TableView,
)
from tailrace.realtime.switching import RealtimeMode

#: Window over which rates are averaged, in seconds: long enough to be steady, short enough to be current.
WINDOW_S = 10.0
REFRESH_S = 0.25
LINE_INTERVAL_S = 5.0
#: Limit of the tables of a snapshot that are shown one by one.
TABLES_SHOWN = 4
#: Interval of lines while nothing changes, in seconds: enough to see that the process works.
IDLE_LINE_INTERVAL_S = 30.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The counts at one moment; `positions` are the sinks', in their order."""

    at_s: float
    rows: int
    bytes: int
    log_end: int
    positions: tuple[int, ...]


class Pace:
    """Rates over the last seconds. Pure: the clock is in the samples."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()

    def note(self, sample: Sample) -> None:
        """Add a sample; remove those older than the window."""
        self._samples.append(sample)
        while len(self._samples) > 2 and sample.at_s - self._samples[0].at_s > WINDOW_S:
            self._samples.popleft()

    @property
    def rows_per_s(self) -> float:
        """Captured rows per second."""
        return self._rate(lambda sample: sample.rows)

    @property
    def bytes_per_s(self) -> float:
        """Captured bytes per second."""
        return self._rate(lambda sample: sample.bytes)

    def eta_s(self, sink: int) -> float | None:
        """Return the seconds until this sink has caught up; None if it does not catch up, or already has."""
        newest = self._samples[-1] if self._samples else None
        if newest is None or newest.log_end <= newest.positions[sink]:
            return None
        gain = self._rate(lambda sample: sample.positions[sink] - sample.log_end)
        return (newest.log_end - newest.positions[sink]) / gain if gain > 0 else None

    def _rate(self, count: Callable[[Sample], int]) -> float:
        if len(self._samples) < 2:
            return 0.0
        first, last = self._samples[0], self._samples[-1]
        took_s = last.at_s - first.at_s
        return (count(last) - count(first)) / took_s if took_s > 0 else 0.0


class ProgressDisplay:
    """Shows an engine's views while the context is open. `turn` is quick and never raises."""

    def __init__(self) -> None:
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._paces: dict[str, Pace] = defaultdict(Pace)  # by source
        self._shown_s = 0.0
        self._state: PipelineState | None = None
        self._shown: dict[str, tuple[object, ...]] = {}

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.stop()

    def turn(self, view: PipelineView) -> None:
        """Show `view` if the interval has passed or the engine's state has changed. What can't be written
        (the disk is full, the terminal or pipe was closed) is left out.
        """
        with contextlib.suppress(OSError):
            self._turn(view)

    def _turn(self, view: PipelineView) -> None:
        now_s = time.monotonic()
        moving = {source.name: _counts(source) for source in view.sources}
        interval_s = REFRESH_S
        if self._live is None:
            interval_s = LINE_INTERVAL_S if moving != self._shown else IDLE_LINE_INTERVAL_S
        if view.state is self._state and now_s - self._shown_s < interval_s:
            return
        before, self._shown_s, self._state, self._shown = self._shown, now_s, view.state, moving
        for source in view.sources:
            positions = tuple(sink.position or 0 for sink in source.sinks)
            task = source.task
            self._paces[source.name].note(Sample(now_s, task.rows, task.bytes, task.log_end or 0, positions))
        if self._live is not None:
            self._live.update(table(view, self._paces), refresh=True)
        else:
            moved = [source for source in view.sources if moving[source.name] != before.get(source.name)]
            for source in moved or view.sources:
                # Not through rich: in a pipe, the line must not be wrapped.
                shown = line(view.state, source, self._paces[source.name])
                print(shown, file=self._console.file, flush=True)


def line(state: PipelineState, source: SourceView, pace: Pace) -> str:
    """Return one source of an engine as one line."""
    now_us = time.time_ns() // 1000
    task = source.task
    parts = [time.strftime("%H:%M:%S")]
    if source.name:
        parts.append(f"{source.name}:")
    parts += [
        phase(state, source),
        f"{task.rows:,} rows",
        f"{pace.rows_per_s:,.0f} rows/s",
        f"{size(pace.bytes_per_s)}/s",
        f"behind source {lag(task.source_lag_bytes, task.source_lag_s(now_us))}",
    ]
    parts += [f"snapshot of {printable(table.name)}: {table_progress(table)}" for table in being_read(task)]
    if task.concerns:
        parts.append(f"slot: {slot(task)}")
    for number, sink in enumerate(source.sinks):
        parts.append(f"| {sink.name} {_sink_state(sink)} at {sink.position or 0:,}")
        parts.append(f"behind log {sink_lag(sink, task.log_end, now_us)}")
        if (eta_s := pace.eta_s(number)) is not None and sink.lag_bytes(task.log_end):
            parts.append(f"ETA {duration(eta_s)}")
    return "  ".join(parts)


def table(view: PipelineView, paces: Mapping[str, Pace]) -> Table:
    """Return `view` as a table for a terminal."""
    doing = phase(view.state, view.sources[0]) if len(view.sources) == 1 else str(view.state)
    shown = Table(title=f"{view.name}: {doing}", title_justify="left", box=None, pad_edge=False)
    for column in ("", "state", "position", "rows", "rows/s", "behind", "ETA"):
        shown.add_column(column, justify="left" if column in ("", "state") else "right", no_wrap=True)
    for source in view.sources:
        _add_rows(shown, source, paces[source.name])
    return shown


def _add_rows(shown: Table, source: SourceView, pace: Pace) -> None:
    now_us = time.time_ns() // 1000
    task, log = source.task, f"{source.name} log" if source.name else "log"
    shown.add_row(
        Text(f"{source.name or 'source'} → log"),
        task.state,
        f"{task.log_end or 0:,}",
        f"{task.rows:,}",
        f"{pace.rows_per_s:,.0f} ({size(pace.bytes_per_s)}/s)",
        lag(task.source_lag_bytes, task.source_lag_s(now_us)),
        "",
    )
    for each in being_read(task):
        shown.add_row(Text(f"snapshot of {printable(each.name)}"), Text(table_progress(each)))
    if task.concerns:
        shown.add_row(f"{source.name} slot".strip(), Text(slot(task)))
    for number, sink in enumerate(source.sinks):
        eta_s = pace.eta_s(number)
        shown.add_row(
            Text(f"{log} → {sink.name}"),
            _sink_state(sink),
            f"{sink.position or 0:,}",
            f"{sink.rows:,}",
            "",
            sink_lag(sink, task.log_end, now_us),
            "" if eta_s is None else duration(eta_s),
        )


def _sink_state(sink: SinkView) -> str:
    if sink.realtime is None or sink.realtime.mode is RealtimeMode.OFF:
        return str(sink.state)
    return f"{sink.state}, real time {sink.realtime.mode}"


def phase(state: PipelineState, source: SourceView) -> str:
    """Return the phase of a source's capture, with the percentage of a snapshot."""
    task = source.task
    about = str(state)
    if source.name and state is not PipelineState.STOPPING:
        about = task.state  # the engine's state is that of the least advanced source
    if about == PipelineState.SNAPSHOT and task.snapshot_rows_estimated > 0:
        share = min(99, 100 * task.snapshot_rows // task.snapshot_rows_estimated)
        return f"snapshot {share} %"
    return "waiting for disk" if task.state == "waiting_for_disk" else about


def being_read(task: CaptureView) -> tuple[TableView, ...]:
    """Return the tables that a snapshot has not completely read, those with rows read first."""
    return tuple(sorted(task.snapshot, key=lambda table: table.rows == 0))[:TABLES_SHOWN]


def table_progress(table: TableView) -> str:
    """Return the progress of a table's snapshot as a short text."""
    share = min(99, 100 * table.rows // table.rows_estimated) if table.rows_estimated else 0
    words = [f"{share} %"]
    if table.chunks > 1:
        words.append(f"chunk {table.chunks_done} of {table.chunks}")
    if table.eta_s is not None:
        words.append(f"ETA {duration(table.eta_s)}")
    return ", ".join(words)


def _counts(source: SourceView) -> tuple[object, ...]:
    sinks = ((sink.position, sink.state) for sink in source.sinks)
    return (source.task.rows, source.task.state, *sinks)


def slot(task: CaptureView) -> str:
    """Return the slot's state as a short text, for a slot with warnings."""
    if task.slot is None:
        return printable(task.concerns[0].key)
    held = task.slot.retained_bytes
    words = [task.slot.state] if held is None else [task.slot.state, f"{size(held)} held"]
    # Only the first warning; the log has it with the remedy.
    return ", ".join(filter(None, [*words, task.concerns[0].key.partition(":")[0]]))


def sink_lag(sink: SinkView, log_end: int | None, now_us: int) -> str:
    """Return a sink's lag behind the log as a short text."""
    return lag(sink.lag_bytes(log_end), sink.lag_s(log_end, now_us))


def lag(behind: int | None, seconds: float | None) -> str:
    """Return a lag as a short text."""
    if behind is None:
        return "?"
    return size(behind) if seconds is None else f"{size(behind)} / {seconds:.1f} s"


def size(count: float) -> str:
    """Return a number of bytes in the largest unit that leaves at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def duration(seconds: float) -> str:
    """Return a duration as h:mm:ss, as m:ss min below an hour, or as seconds below a minute."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02} min"
