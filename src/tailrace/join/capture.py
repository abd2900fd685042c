"""The capture of joined topics: writes whole transactions from Kafka to the change log.

In each transaction the log has the positions of the partitions that have rows of it, so after a restart these
always match the log. The log's position is that of the transaction's commit if its id has one (PostgreSQL),
otherwise the offset of its `END` plus one.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tailrace import failpoints
from tailrace.changelog.directory import TASK, LogDirectory
from tailrace.changelog.writer import LogListener, LogOptions, LogWriter, Tail
from tailrace.config.sections import LogConfig
from tailrace.errors import Kind, Stopped, TailraceError
from tailrace.join.assembly import Assembly, TransactionRun
from tailrace.join.avro import AvroDocuments
from tailrace.join.connector import extraction_of
from tailrace.join.debezium_rows import TABLES, DebeziumTables, json_document
from tailrace.join.flow import FlowProgress, JoinFlow
from tailrace.join.merge import UNKNOWN, Position
from tailrace.join.messages import MessageReader, Place
from tailrace.join.options import KafkaJoinSection
from tailrace.join.partition import EndedTransaction, offset_of, position_of
from tailrace.model import SourceFingerprint
from tailrace.protocol import frames, metadata_frames
from tailrace.sources.progress import CaptureProgress, PhaseName, SourceHealth
from tailrace.sources.reconnection import Reconnection
from tailrace.sources.row_frames import RowFrames

#: Interval of requesting the ends of partitions, and new partitions, in seconds.
_LOOK_S = 0.5
#: Shortest interval of writing the positions of partitions without rows, in seconds, with other frames.
_IDLE_S = 30.0
#: Longest wait of a read for the first message, in seconds.
_READ_S = 0.1
#: Approximate number of rows that are collected before they are appended.
_CHUNK_ROWS = 20_000
#: Largest time in the log, in microseconds since 1970; the log counts from 2000.
_TIME_US_MAX = 2**62

_NUMBER = re.compile(r"(\d{1,10}):")


def fingerprint(section: KafkaJoinSection, reader: MessageReader) -> SourceFingerprint:
    """Return the fingerprint of the source in a log of these topics."""
    return SourceFingerprint(
        "kafka-join", reader.cluster(), section.transactions, ",".join(sorted(section.data))
    )


def document_of(section: KafkaJoinSection) -> Callable[[bytes], tuple[Mapping[str, Any], Any]]:
    """Return a function that returns a message's schema and payload."""
    return json_document if section.registry is None else AvroDocuments(section.registry)


def position_after(ended: EndedTransaction) -> int:
    """Return the log's position after a transaction."""
    return _commit_position(ended.order, ended.offset) + 1


def _commit_position(order: int | None, offset: int) -> int:
    return offset + 1 if order is None else order


def _time_us(time_ms: int | None, offset: int) -> int:
    """Return a transaction's time for the log; 0: it has none.

    :raises TailraceError: `JOIN_VIOLATED` if the time does not fit into the log.
    """
    time_us = 1000 * (time_ms or 0)
    if abs(time_us) > _TIME_US_MAX:
        raise TailraceError(
            Kind.JOIN_VIOLATED,
            "read the transaction topic: the time of a transaction is not in milliseconds since 1970",
            "correct the field or the expression `time_ms` of `transactions`, or leave it out",
            {"offset": offset},
        )
    return time_us


class KafkaJoinCapture:
    """The capture of one cluster's topics into one log (`sources.contract.Capture`)."""

    def __init__(
        self,
        section: KafkaJoinSection,
        path: Path,
        options: LogConfig,
        reader_of: Callable[[KafkaJoinSection], MessageReader],
        listener: LogListener | None = None,
    ) -> None:
        self._section, self._path, self._reader_of = section, path, reader_of
        self._options = LogOptions(segment_bytes=options.segment_bytes, compression=options.compression)
        self._listener = listener
        self._stopping = threading.Event()
        self._phase: PhaseName = "connecting"
        self._durable = Tail(0, 0, 0)
        self._rows = 0
        self._source_end = 0
        self._is_at_end = False
        self._connections = Reconnection(
            section,
            self._stopping,
            name=section.source_name,
            position=lambda: self._durable.position,
            is_heard=lambda: self._phase == "streaming",
        )
        self._flow_progress = FlowProgress()

    def run(self) -> None:
        """Capture until `stop`.

        :raises TailraceError: errors that need the user; `SOURCE_UNREACHABLE` if it lasts.
        """
        try:
            self._connections.run(self._run_once)
        except Stopped:
            pass
        finally:
            self._phase = "stopped"

    def stop(self) -> None:
        """Make `run` return."""
        self._stopping.set()

    def caught_up(self, position: int) -> bool:
        """Return whether everything before `position` is durable, and each partition was once at its end."""
        return self._is_at_end and self._durable.position >= position

    def progress(self) -> CaptureProgress:
        """Return the capture's progress."""
        durable, flow = self._durable, self._flow_progress
        return CaptureProgress(
            phase=self._phase,
            rows=self._rows,
            bytes=durable.offset,
            appended=durable,
            durable=durable,
            source_end=max(self._source_end, durable.position),
            acknowledged=durable.position,
            snapshot={},
            reconnects=self._connections.count,
            error=self._connections.error,
            health=SourceHealth("reading", None, asdict(flow), flow.numbers()),
        )

    def _run_once(self) -> None:
        self._phase = "connecting"
        reader = self._reader_of(self._section)
        try:
            directory = LogDirectory.create_or_open(self._path, fingerprint(self._section, reader))
            writer = LogWriter.open(directory, TASK, options=self._options, listener=self._listener)
            try:
                self._durable = writer.durable
                self._stream(_Stream(self._section, reader, writer))
            finally:
                writer.close()
        finally:
            reader.close()

    def _stream(self, stream: _Stream) -> None:
        looked_s = 0.0
        self._phase, self._connections.error = "streaming", None
        while not self._stopping.is_set():
            stream.flow.read(_READ_S)
            self._rows += stream.take_and_write()
            if time.monotonic() >= looked_s + _LOOK_S or stream.flow.is_held:
                looked_s = time.monotonic()
                is_at_end = stream.look()
                self._rows += stream.take_and_write()
                stream.write_progress()
                self._flow_progress = stream.flow.progress()
                self._source_end = stream.end
                self._is_at_end |= is_at_end
            if stream.durable != self._durable:
                self._durable = stream.durable


class _Stream:
    """The stream of transactions from the log's end on, over one connection."""

    def __init__(self, section: KafkaJoinSection, reader: MessageReader, writer: LogWriter) -> None:
        self.flow = JoinFlow(section, extraction_of(section), reader)
        self.durable = writer.durable
        self.end = writer.durable.position
        in_force = writer.schema_in_force
        self._section, self._writer = section, writer
        self._tables = DebeziumTables(in_force, section.unavailable_value_placeholder, document_of(section))
        self._assembly = Assembly()
        self._frames = RowFrames(in_force)
        self._collected = 0  # rows
        self._closed = UNKNOWN  # the transaction that was completed last
        self._passed: EndedTransaction | None = None  # the last one before those that are still needed
        self._open_facts: dict[str, Any] = {}
        self._states: dict[Place, Position] = {}  # after the rows written of the open transaction
        self._idle_s = time.monotonic()
        self._position = writer.tail.position
        states = metadata_frames.shard_states(in_force)
        states.pop(TABLES, None)
        self._written = {_place(name): position_of(state) for name, state in states.items()}
        begin = _positions_to_begin(self._written)
        # Rows of a new partition belong to transactions that are not in the log yet.
        first = min((at.transactions for at in begin.values()), default=None)
        new = None if first is None else Position(0, first)
        self.flow.begin({place: begin.get(place, new) for place in self.flow.places()})
        # Written with the first rows: retention may have removed the messages before these positions.
        self._begun = {
            place: partition.merge.position
            for place, partition in self.flow.partitions.items()
            if place not in self._written
        }
        # Offset before which each END was read before partitions were last listed.
        self._looked_at = 0

    def take_and_write(self) -> int:
        """Take joined rows, and write the transactions that are whole; return the number of rows written."""
        flow, window, written = self.flow, self.flow.window, 0
        if window is None:
            return 0
        while True:
            for place, partition in flow.partitions.items():
                # Even if rows of it wait: the next ones may complete their transaction.
                if (taken := partition.take_rows(window)) is not None:
                    self._assembly.add(place, taken)
            rows = self._write()
            written += rows
            if not rows:
                break
        self._append()
        for place in flow.partitions:
            flow.hold_or_read_on(place, self._assembly.waiting(place), self._assembly.waiting_bytes(place))
        first = self._first_needed()
        self._passed = window.last_before(first) or self._passed
        flow.forget(first)
        return written

    def look(self) -> bool:
        """Start new partitions, and pass transactions; return whether all partitions are at their end."""
        flow, window = self.flow, self.flow.window
        fed = 0 if window is None else window.next_offset
        new = Position(0, self._first_needed())
        flow.look_for_partitions(flow.places, lambda _: new)
        self._looked_at = fed
        # Even if joined rows wait here: each has its position, and no rows of the passed transactions follow.
        flow.pass_transactions(list(flow.partitions))
        if window is not None and (last := window.last_before(window.next_offset)) is not None:
            self.end = max(self.end, position_after(last))
        return all(map(flow.is_at_end, flow.partitions))

    def write_progress(self) -> None:
        """Write the source's position past transactions without rows, and positions of idle partitions."""
        last = self._passed
        if self._assembly.open is not None or last is None or position_after(last) <= self._position:
            return
        self._idle_states()
        self._position = position_after(last)
        self._frames.progress(self._position, _time_us(last.time_ms, last.offset))
        self._append()

    # ------------------------------------------------------------------ transactions

    def _needed(self, place: Place) -> int:
        return self.flow.partitions[place].transactions_needed

    def _first_needed(self) -> int:
        first = self._frontier()
        if (is_open := self._assembly.open) is not None:
            first = min(first, is_open)
        return min(first, self._looked_at)

    def _write(self) -> int:
        rows = self._snapshot(self._assembly.take_loose())
        while (found := self._next()) is not None:
            transaction, facts = found
            closes = self._is_whole(transaction, facts["event_count"])
            if not closes and not self._is_full():
                break
            rows += self._transaction(transaction, facts, closes=closes)
            rows += self._snapshot(self._assembly.take_loose())
            if self._collected >= _CHUNK_ROWS:
                self._append()
            if not closes:
                break
        return rows

    def _next(self) -> tuple[int, dict[str, Any]] | None:
        # Returns the next transaction and its facts, if it is known that no other one precedes it.
        if (is_open := self._assembly.open) is not None:
            return is_open, self._open_facts
        run, window = self._assembly.next(), self.flow.window
        if run is None or run.transaction is None or window is None:
            return None
        is_next = window.first_after(self._closed) == run.transaction or (
            self._frontier() >= run.transaction and run.transaction <= self._looked_at
        )
        return (run.transaction, run.facts) if is_next else None

    def _is_whole(self, transaction: int, count: int | None) -> bool:
        if count is not None and self._assembly.rows_of(transaction) >= count:
            return True
        # The count may include rows of other topics: it is whole if no partition, old or new, can have more.
        return transaction < self._looked_at and self._frontier(transaction) > transaction

    def _frontier(self, beside: int | None = None) -> int:
        return self._assembly.frontier(self._needed, list(self.flow.partitions), beside)

    def _is_full(self) -> bool:
        limit = self._section.queue_records_max
        return any(
            partition.is_paused or self._assembly.waiting(place) >= limit
            for place, partition in self.flow.partitions.items()
        )

    def _transaction(self, transaction: int, facts: dict[str, Any], *, closes: bool) -> int:
        assembly, is_open = self._assembly, self._assembly.open == transaction
        if closes:
            runs = assembly.take(transaction, closes=True)
        else:
            upto = assembly.in_order_upto(transaction, self._needed, list(self.flow.partitions))
            if not (runs := assembly.take(transaction, closes=False, upto=upto)):
                return 0  # the next row is in a partition that is not full
        if not is_open:
            self._open_facts = facts
            self._position = _commit_position(facts["position"], transaction)
            number = _NUMBER.match(facts["id"] or "")
            xid = int(number[1]) if number else 0
            time_us = _time_us(facts["ts_ms"], transaction)
            self._frames.begin(self._position, time_us, xid if xid < 1 << 32 else 0)
            self._states = self._states_begun()
        self._rows_of(runs)
        self._states |= {run.place: run.position for run in runs}
        if closes:
            self._tables.write_rest(self._frames)
            for place, position in self._states.items():
                self._state(place, position)
            if time.monotonic() >= self._idle_s + _IDLE_S:
                self._idle_states()
            self._tables_state()
            self._frames.commit()
            self._position += 1
            self._closed, self._states = transaction, {}
        return sum(run.rows for run in runs)

    def _snapshot(self, runs: Sequence[TransactionRun]) -> int:
        if not runs:
            return 0
        self._position = max(self._position, 1)
        self._frames.begin_snapshot(self._position, time.time_ns() // 1000)
        self._rows_of(runs, rows=True)
        for place, position in (self._states_begun() | {run.place: run.position for run in runs}).items():
            self._state(place, position)
        self._tables_state()
        self._frames.end_snapshot()
        return sum(run.rows for run in runs)

    def _rows_of(self, runs: Sequence[TransactionRun], *, rows: bool = False) -> None:
        found = [
            (step, run, offset, key, value) for run in runs for step, offset, key, value in run.messages()
        ]
        if len(runs) > 1 and not rows:
            found.sort(key=lambda each: each[0])
        for _, run, offset, key, value in found:
            if value is None:
                continue  # a tombstone
            try:
                self._tables.write(self._frames, key, value, rows=rows)
            except TailraceError as error:
                topic, partition = run.place
                place = {"topic": topic, "partition": partition, "offset": offset}
                raise error.changed(place) from None
        self._collected += len(found)

    def _idle_states(self) -> None:
        # So that a restart does not need transactions that retention has removed.
        self._idle_s = time.monotonic()
        states = self._states_begun()
        for place, partition in self.flow.partitions.items():
            if not self._assembly.waiting(place) and not partition.data_queued and place not in self._states:
                states[place] = partition.merge.position
        for place, position in states.items():
            self._state(place, position)

    def _states_begun(self) -> dict[Place, Position]:
        # Returns, only once, the start positions of partitions that have none in the log.
        begun, self._begun = self._begun, {}
        return begun

    def _state(self, place: Place, position: Position) -> None:
        if self._written.get(place) != position:
            self._frames.shard(f"{place[0]}/{place[1]}", dict(offset_of(position)))
            self._written[place] = position

    def _tables_state(self) -> None:
        if (state := self._tables.state()) is not None:
            self._frames.shard(TABLES, state)

    def _append(self) -> None:
        self._collected = 0
        chunk = self._frames.take()
        if not len(chunk):
            return
        summary = frames.summarise(chunk, self._writer.scan_state())
        failpoints.hit("capture.before_append")
        self._writer.append(chunk, summary)
        failpoints.hit("capture.after_append")
        self.durable = self._writer.sync()


def _positions_to_begin(written: Mapping[Place, Position]) -> dict[Place, Position]:
    # The log has everything before its last transaction with rows, for all partitions: even one without rows
    # for a long time needs none of the earlier transactions.
    last = max((at.transactions for at in written.values() if at.seen), default=UNKNOWN)
    return {place: Position(at.data, last) if at.transactions < last else at for place, at in written.items()}


def _place(name: str) -> Place:
    topic, _, partition = name.rpartition("/")
    return topic, int(partition)
