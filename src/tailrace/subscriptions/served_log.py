"""A change log as subscriptions read it: their start position, and the changes from there on.

Columns, masks and forms of values are as in `tailrace tail`: those of the pipeline's file or, if only the
log's directory is known, those stored with the log. The latter are read again for each part of the log that
has become durable, as capture stores new rules before it appends changes that they apply to.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tailrace.changelog.directory import TASK, LogDirectory
from tailrace.changelog.disclosure import disclosure_is_kept, kept_disclosure
from tailrace.changelog.reader import LogReader
from tailrace.config import ColumnPolicy, EngineConfig
from tailrace.decode.changes import no_changes
from tailrace.decode.column_policy import TablePolicy
from tailrace.decode.schemas import Catalog
from tailrace.errors import Kind, TailraceError
from tailrace.model import OWN_FORMS, Relation, ValueModes
from tailrace.pipeline.log.consumer import next_split
from tailrace.pipeline.log.inspection import origin_of
from tailrace.pipeline.log.root import log_folders
from tailrace.protocol.metadata_frames import schema_frames
from tailrace.ranges.changes import decoded_batches, with_renames
from tailrace.ranges.plan import MIB, InputSplit
from tailrace.ranges.positions import locate, parse_point
from tailrace.subscriptions.events import DecodedRange, EventLines, chosen
from tailrace.subscriptions.filters import ChangeFilter

#: Limit of a part for a subscription that is behind, in bytes.
PART_BYTES_MAX = 512 * 1024
#: Limit of the log that is decoded for a part, in bytes.
_DECODED_BYTES_MAX = MIB
#: Limit of one call of `read`, in seconds, even if it found nothing: other subscriptions wait for the thread.
_READ_S = 0.05
#: Number of digits of a log's id in a position.
_MARK_DIGITS = 8
#: Most digits of a log offset, which has 64 bits.
_DIGITS_MAX = 19


@dataclass(frozen=True, slots=True)
class LogPlace:
    """The path of a log, and the form in which subscribers get its changes.

    `rules` None: those stored with the log. `awaited`: the rules that capture must have stored in the log
    before it is served: it asks the server which columns they name. None: there is no wait. `captures`:
    whether the pipeline's file selects a table, by its schema and name.
    """

    name: str
    path: Path
    rules: ColumnPolicy | None = None
    modes: ValueModes = OWN_FORMS
    awaited: ColumnPolicy | None = None
    captures: Callable[[str, str], bool] = lambda _schema, _table: False


def places_of(config: EngineConfig) -> tuple[LogPlace, ...]:
    """Return the logs of a pipeline's file, one for each source."""
    return tuple(
        LogPlace(
            each.source_name,
            each.log.path,
            each.source.disclosure,
            each.source.value_modes,
            each.source.awaited_policy,
            each.source.captures,
        )
        for each in config.pipelines
    )


def places_in(directory: Path) -> tuple[LogPlace, ...]:
    """Return the log in a directory, or those of several sources."""
    return tuple(LogPlace(each.name, each) for each in log_folders(directory)) or (LogPlace("", directory),)


class ServedLog:
    """One log, opened at the first read, and again after `close`. Any thread."""

    def __init__(self, place: LogPlace) -> None:
        self.place = place
        self._lock = threading.RLock()
        self._opened: tuple[LogDirectory, LogReader] | None = None
        self._policy: tuple[ColumnPolicy, TablePolicy] | None = None

    @property
    def mark(self) -> str:
        """The suffix of log offsets in positions, which identifies this log."""
        return f"@{self._open()[0].identity.log_id[:_MARK_DIGITS]}"

    def close(self) -> None:
        """Clear the caches."""
        with self._lock:
            if self._opened is not None:
                self._opened[1].close()
            self._opened = None

    def end(self) -> int:
        """Return the log offset at which the durable log ends.

        :raises TailraceError: `LOG_MISSING`, `LOG_CORRUPT`.
        """
        return self._open()[1].end().offset

    def begin(self, text: str | None) -> int:
        """Return the log offset of a client's text: a position from an event, or as for `tail --from`.

        :param text: None: the log's end.
        :raises TailraceError: `CONFIG_INVALID` if it can't be parsed; `LOG_RANGE_GONE` if retention has
            removed it, with the `oldest` position in the context; `LOG_RANGE_INVALID` if it is after the
            end; `OFFSETS_FOREIGN` if it belongs to another log.
        """
        _, reader = self._open()
        if text is None:
            return reader.end().offset
        offset, at, _ = text.partition("@")
        if at and self._own_offset(text, offset) > reader.end().offset:
            # After a loss of power, until capture has opened the log: the subscription waits at its position.
            return int(offset)
        try:
            point = parse_point(offset)
        except ValueError as error:
            raise TailraceError(
                Kind.CONFIG_INVALID,
                f"subscribe from a position: {error}",
                "take it from `id`, `from` or the log; in a URL, + is written as %2B",
            ) from None
        with self._naming_oldest(offset):
            return locate(reader, point)

    def check(self, wanted: ChangeFilter) -> None:
        """Refuse a filter with a table that the log does not have, or an expression that does not fit it.

        :raises TailraceError: `TABLE_UNKNOWN`, `CONFIG_INVALID`; `SCHEMA_PENDING` as `_table_policy`.
        """
        self._table_policy()
        tables = wanted.exact_tables
        if tables is None:
            return
        known = self._relations()
        for table in tables:
            if table not in known:
                if self.place.captures(*table.split(".", 1)) or self._had(table):
                    continue
                raise TailraceError(
                    Kind.TABLE_UNKNOWN,
                    f"subscribe to {table}: the log has no change of such a table",
                    f"correct the name; or, to wait for the table's first change, write {table}*. There are "
                    + (", ".join(sorted(known)[:20]) or "no tables yet"),
                    {"table": table},
                )
            if wanted.where and not (relation := known[table]).pending:
                policy = with_renames(self._table_policy(), self._open()[1])
                wanted.check(no_changes(relation, policy))

    def read(self, at: int, wanted: ChangeFilter) -> tuple[EventLines, int]:
        """Return the next selected changes from `at` on, a bounded part, and the log offset to continue from.

        :raises TailraceError: `LOG_RANGE_GONE` as `begin`, `LOG_CORRUPT`, `DECODE_FAILED`, `SCHEMA_PENDING`;
            `CONFIG_INVALID` if the expression does not fit a table.
        """
        with self._naming_oldest(str(at)):
            return self._read(at, wanted)

    def _read(self, at: int, wanted: ChangeFilter) -> tuple[EventLines, int]:
        directory, reader = self._open()
        until = time.monotonic() + _READ_S
        while (split := next_split(reader, TASK, at, bytes_max=_DECODED_BYTES_MAX)) is not None:
            split = _first_of(split)
            policy, modes = self._table_policy(), self.place.modes
            for decoded in decoded_batches(reader, split, wanted.exact_tables, modes, policy):
                events, left_out = chosen(
                    decoded.changes, wanted, TASK, origin_of(directory), since=at, bytes_max=PART_BYTES_MAX
                )
                at = events.end if left_out else decoded.end
                if len(events):
                    return events, at
            at = max(at, split.end)
            if time.monotonic() > until:
                break
        return EventLines(), at

    def batches(self, at: int) -> Iterator[DecodedRange]:
        """Yield the durable log from `at` on, decoded, without a gap; nothing if there is nothing new.

        :raises TailraceError: as `read`.
        """
        directory, reader = self._open()
        split = next_split(reader, TASK, at)
        if split is None:
            return
        policy, origin = self._table_policy(), origin_of(directory)
        for decoded in decoded_batches(reader, split, None, self.place.modes, policy):
            yield DecodedRange(at, decoded.end, decoded.changes, TASK, origin)
            at = decoded.end
        if at < split.end:
            yield DecodedRange(at, split.end, (), TASK, origin)

    def _open(self) -> tuple[LogDirectory, LogReader]:
        with self._lock:
            if self._opened is None:
                directory = LogDirectory.open(self.place.path)
                self._opened = directory, LogReader.open(directory, TASK)
            return self._opened

    def _table_policy(self) -> TablePolicy:
        """Return the current policy for tables and columns.

        :raises TailraceError: as `kept_disclosure` and `TablePolicy.of`; `SCHEMA_PENDING` if it is not known
            which columns the rules name.
        """
        rules, awaited = self.place.rules, self.place.awaited
        if awaited is not None and not disclosure_is_kept(self._open()[0], TASK, awaited):
            raise TailraceError(
                Kind.SCHEMA_PENDING,
                "serve changes: capture has not run with this file's settings for columns and masks, and "
                "only it can ask the source which columns they name",
                "start `tailrace run` with this file; if it runs with a changed file, start `tailrace serve` "
                "again, too",
            )
        if rules is None:
            rules = kept_disclosure(self._open()[0], TASK)
        with self._lock:
            if self._policy is None or self._policy[0] != rules:
                self._policy = rules, TablePolicy.of(rules)
            return self._policy[1]

    def _relations(self) -> dict[str, Relation]:
        """Return the tables at the log's end, by name, with all columns that the log has."""
        _, reader = self._open()
        end = reader.end().offset
        frames = reader.all_schema_frames(end, end)
        catalog = Catalog(frames, self.place.modes)
        keys = [
            key
            for frame in frames
            for key, _ in schema_frames(np.frombuffer(frame, np.uint8))
            if key.startswith("R")
        ]
        relations = [catalog.relation(int(key[1:])) for key in keys]
        return {relation.qualified_name: relation for relation in relations}

    def _had(self, table: str) -> bool:
        """Return whether a table had this name in an earlier part of the log."""
        # By a reader of its own: this looks at the whole log, and others wait for the shared one.
        with LogReader.open(self.place.path, TASK) as reader:
            frames = reader.all_schema_frames(reader.start, reader.end().offset)
        return any(Catalog([frame]).named({table}) for frame in frames)

    @contextlib.contextmanager
    def _naming_oldest(self, wanted: str) -> Iterator[None]:
        """Add the oldest position to the error of a position that retention has removed."""
        try:
            yield
        except TailraceError as error:
            if error.kind is not Kind.LOG_RANGE_GONE:
                raise
            oldest = f"{self._open()[1].start}{self.mark}"
            raise TailraceError(
                error.kind,
                f"subscribe from {wanted}: retention has removed it; the log begins at {oldest}",
                f"read the tables again, then subscribe from {oldest} or without a position; and raise "
                "the limits in log.retention",
                {"oldest": oldest},
            ) from None

    def _own_offset(self, text: str, offset: str) -> int:
        """Return the log offset of an event's position, which lies in the log's files.

        :raises TailraceError: `OFFSETS_FOREIGN`.
        """
        if text != f"{offset}{self.mark}" or not offset.isdecimal() or len(offset) > _DIGITS_MAX:
            raise TailraceError(
                Kind.OFFSETS_FOREIGN,
                f"subscribe from {text}: the position belongs to another log; this one is {self.mark[1:]}",
                "read the tables again, then subscribe without a position",
            )
        _, reader = self._open()
        if int(offset) > reader.end().offset and int(offset) > (end := reader.end_on_disk()):
            raise TailraceError(
                Kind.OFFSETS_FOREIGN,
                f"subscribe from {text}: the log ends at {end}, so its end was lost",
                "read the tables again, then subscribe without a position",
            )
        return int(offset)


def _first_of(split: InputSplit) -> InputSplit:
    """Return the first blocks of an input split, as many as are decoded in one batch."""
    size = 0
    for number, block in enumerate(split.blocks):
        size += block.header.raw_size
        if number and size > _DECODED_BYTES_MAX:
            blocks = split.blocks[:number]
            return replace(split, end=min(split.end, blocks[-1].header.end), blocks=blocks)
    return split
