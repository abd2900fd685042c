"""Changes in the form for subscribers: the JSON of `tailrace tail --json`, each with the position after it.

Arrow builds the messages from JSON lines, which are written once for each part of the log.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.decode.changes import TableChanges
from tailrace.decode.json.debezium import SourceInfo
from tailrace.protocol.frames import Numbers
from tailrace.subscriptions.filters import ChangeFilter

_ANYWHERE = 1 << 62
#: Number of filters whose events are cached for a part of the log.
_EVENTS_KEPT = 4
#: Approximate size of a change's JSON without its values, in bytes.
_BESIDE = 450


@dataclass(frozen=True, slots=True)
class EventLines:
    """Changes in log order: their log offsets, and a line of JSON for each, with its newline."""

    offsets: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    lines: pa.LargeStringArray = field(default_factory=lambda: pa.array([], pa.large_string()))

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def end(self) -> int:
        """The log offset to continue from after the last one."""
        return int(self.offsets[-1]) + 1

    def since(self, at: int) -> EventLines:
        """Return the changes from log offset `at` on, inclusive."""
        first = int(np.searchsorted(self.offsets, at))
        return self if first == 0 else EventLines(self.offsets[first:], self.lines.slice(first))

    def first(self, bytes_max: int) -> EventLines:
        """Return the first changes, up to `bytes_max` bytes but at least one change."""
        if not len(self):
            return self
        upto = max(1, int(np.searchsorted(_ends(self.lines), bytes_max, side="right")))
        return EventLines(self.offsets[:upto], self.lines.slice(0, upto))

    def as_stream(self, log_mark: str) -> bytes:
        """Return the changes as Server-Sent Events. `id` is the position to continue from after the event.

        :param log_mark: is appended to each log offset.
        """
        ids = pc.cast(pa.array(self.offsets + 1), pa.large_string())
        head, middle = (pa.scalar(text, pa.large_string()) for text in ("id: ", f"{log_mark}\ndata: "))
        end = pa.scalar("\n", pa.large_string())
        none = pa.scalar("", pa.large_string())
        found = pc.binary_join_element_wise(head, ids, middle, self.lines, end, none)
        return _bytes(found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found)

    def as_messages(self, log_mark: str) -> list[str]:
        """Return the changes as messages of a WebSocket; `from` is the position after the change."""
        offsets, lines = (self.offsets + 1).tolist(), self.lines.to_pylist()
        return [
            f'{{"from":"{offset}{log_mark}","change":{line.removesuffix(chr(10))}}}'
            for offset, line in zip(offsets, lines, strict=True)
        ]


def chosen(
    found: Sequence[TableChanges],
    wanted: ChangeFilter,
    task: str,
    origin: SourceInfo,
    *,
    since: int,
    bytes_max: int,
) -> tuple[EventLines, bool]:
    """Return the changes from log offset `since` on, inclusive, that a filter selects.

    :param bytes_max: approximate limit of their size, except for a single larger change.
    :return: the changes, and whether the limit left any out.
    """
    left = [each.slice(since, _ANYWHERE) for each in found]
    parts = [changes.take(rows) for changes in left if len(rows := wanted.rows(changes))]
    if not parts:
        return EventLines(), False
    offsets = np.concatenate([changes.log_offset for changes in parts])
    sizes = np.concatenate([np.full(each.count, _BESIDE + each.size_bytes / each.count) for each in parts])
    order = np.argsort(offsets, kind="stable")
    fitting = max(1, int(np.searchsorted(np.cumsum(sizes[order]), bytes_max, side="right")))
    if left_out := fitting < len(order):
        end = int(offsets[order[fitting]])
        parts = [changes.slice(since, end) for changes in parts]
    lines = [(changes.log_offset, changes.json_lines(task, origin)) for changes in parts if changes.count]
    return in_order(lines), left_out


def in_order(parts: Sequence[tuple[Numbers, pa.LargeStringArray]]) -> EventLines:
    """Return events of several tables, each in log order, merged into log order."""
    if not parts:
        return EventLines()
    if len(parts) == 1:
        return EventLines(*parts[0])
    offsets = np.concatenate([each for each, _ in parts])
    order = np.argsort(offsets, kind="stable")
    lines = pa.concat_arrays([lines for _, lines in parts])
    return EventLines(offsets[order], lines.take(pa.array(order)))


class DecodedRange:
    """The changes in `[start, end)` of the log, decoded once for all subscriptions. Any thread."""

    def __init__(
        self, start: int, end: int, found: Sequence[TableChanges], task: str, origin: SourceInfo
    ) -> None:
        self.start, self.end = start, end
        self._found = found
        self._task, self._origin = task, origin
        self._lock = threading.Lock()
        self._lines: dict[int, pa.LargeStringArray] = {}
        self._rows: dict[ChangeFilter, dict[int, Numbers]] = {}
        self._events: dict[ChangeFilter, EventLines] = {}

    def means(self, wanted: ChangeFilter) -> bool:
        """Return whether there is a change of a table that the filter selects."""
        return any(wanted.means(changes) for changes in self._found)

    def has_looked(self, wanted: ChangeFilter) -> bool:
        """Return whether `look` has already run for this filter."""
        return wanted in self._rows

    def look(self, wanted: ChangeFilter) -> bool:
        """Find the changes that a filter selects, once; return whether there are any.

        :raises TailraceError: as `ChangeFilter.rows`; `DECODE_FAILED`.
        """
        if (known := self._rows.get(wanted)) is not None:
            return bool(known)
        with self._lock:
            for changes in self._found:
                if wanted.means(changes):
                    changes.tuples()  # cached in the changes, which other threads use meanwhile
        # Without the lock: an expression may take long, and other threads must not wait for it.
        chosen_rows = {
            number: rows for number, changes in enumerate(self._found) if len(rows := wanted.rows(changes))
        }
        with self._lock:
            for number in chosen_rows:
                if number not in self._lines:
                    self._lines[number] = self._found[number].json_lines(self._task, self._origin)
            self._rows[wanted] = chosen_rows
        return bool(chosen_rows)

    def forget(self, wanted: ChangeFilter) -> None:
        """Remove the results of a filter that no subscription uses any more."""
        self._rows.pop(wanted, None)
        self._events.pop(wanted, None)

    def events(self, wanted: ChangeFilter) -> EventLines:
        """Return the changes that `look` found, cached for a few filters, as they are read part by part."""
        if (known := self._events.get(wanted)) is not None:
            return known
        parts = []
        for number, rows in self._rows[wanted].items():
            offsets, lines = self._found[number].log_offset, self._lines[number]
            if len(rows) < len(offsets):
                offsets, lines = offsets[rows], lines.take(pa.array(rows))
            parts.append((offsets, lines))
        found = in_order(parts)
        if len(self._events) >= _EVENTS_KEPT:
            self._events.clear()
        self._events[wanted] = found
        return found


def _ends(lines: pa.LargeStringArray) -> Numbers:
    """Return the end of each line, in bytes from the start of the first one."""
    places: Numbers = np.frombuffer(lines.buffers()[1], np.int64)
    first, last = lines.offset, lines.offset + len(lines)
    ends: Numbers = places[first + 1 : last + 1] - places[first]
    return ends


def _bytes(lines: pa.LargeStringArray) -> bytes:
    places = np.frombuffer(lines.buffers()[1], np.int64)
    first, last = int(places[lines.offset]), int(places[lines.offset + len(lines)])
    return memoryview(lines.buffers()[2])[first:last].tobytes()
