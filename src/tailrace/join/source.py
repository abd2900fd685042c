"""The type of source `kafka-join`: joined topics, captured into a change log like a database."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import pyarrow as pa

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.writer import LogListener
from tailrace.config import PipelineConfig
from tailrace.config.sections import LogConfig
from tailrace.config.source.section import SourceSection
from tailrace.errors import Kind, TailraceError
from tailrace.fair_semaphore import FairSemaphore
from tailrace.join.capture import KafkaJoinCapture, document_of, position_after
from tailrace.join.connector import extraction_of, reader_of
from tailrace.join.flow import require_one_partition
from tailrace.join.messages import MessageReader, Place
from tailrace.join.options import KafkaJoinSection
from tailrace.join.partition import TransactionWindow
from tailrace.model import Relation, SourceFingerprint
from tailrace.sources.findings import Finding, error, from_failure, warning
from tailrace.sources.progress import SourceLook

#: Number of last messages that are searched for the newest transaction; if there is none, ten times as many.
_TAIL = 10
#: Longest wait for a message that exists, in seconds.
_READ_S = 10.0


class KafkaJoinSource:
    """The source type `kafka-join` (`sources.contract.Source`)."""

    settings: ClassVar[type[SourceSection]] = KafkaJoinSection

    def capture(
        self,
        section: KafkaJoinSection,
        log: Path,
        options: LogConfig,
        *,
        name: str,
        semaphore: FairSemaphore | None = None,
        listener: LogListener | None = None,
    ) -> KafkaJoinCapture:
        """Return the capture of the topics."""
        return KafkaJoinCapture(section, log, options, reader_of, listener)

    def end(self, section: KafkaJoinSection, stop: threading.Event) -> int:
        """Return the position after the newest transaction."""
        reader = reader_of(section)
        try:
            return newest(section, reader)
        finally:
            reader.close()

    def look(
        self, pipeline: PipelineConfig, directory: LogDirectory, timeout_s: float, stop: threading.Event
    ) -> SourceLook:
        """Return the current end of the topics."""
        return SourceLook(self.end(cast(KafkaJoinSection, pipeline.source), stop))

    def snapshots(self, log: Path) -> None:
        """Return None: there are no snapshots other than those in the topics."""

    def check(self, pipeline: PipelineConfig, directory: LogDirectory | None) -> KafkaJoinCheck:
        """Return the preflight."""
        return KafkaJoinCheck(cast(KafkaJoinSection, pipeline.source))

    def findings_together(self, checks: Sequence[KafkaJoinCheck]) -> Iterator[Finding]:
        """Return no findings: sources of this type do not affect each other."""
        return iter(())

    def with_recovery(self, error: TailraceError, pipeline: PipelineConfig) -> TailraceError:
        """Return the error unchanged: there are no snapshots with which to recover."""
        return error

    def leftover_repair(self, source: SourceFingerprint) -> str:
        """Return an empty text: the cluster keeps nothing for a log."""
        return ""


def newest(section: KafkaJoinSection, reader: MessageReader) -> int:
    """Return the position after the newest transaction in the topic; 0: there is none.

    :raises TailraceError: as `MessageReader`; `SOURCE_UNREACHABLE` if no message arrives.
    """
    place: Place = (section.transactions, 0)
    end, count, extraction = reader.end(place), _TAIL, extraction_of(section)
    first = reader.first(place)
    while True:
        begin = max(first, end - count)
        window = TransactionWindow(begin)
        reader.seek(place, begin)
        for messages in _messages(reader, place, end):
            window.add(extraction.transactions(messages))
        if (last := window.last_before(end)) is not None:
            return position_after(last)
        if begin == first:
            return 0
        count *= 10


def _messages(reader: MessageReader, place: Place, end: int) -> Iterator[pa.RecordBatch]:
    # Yields the messages of a partition up to an offset; a read may return those of others, or none.
    moved_s = time.monotonic()
    while (before := reader.position(place)) < end:
        messages = reader.read(_READ_S).messages.get(place)
        if messages is not None:
            yield messages
        if reader.position(place) > before:
            moved_s = time.monotonic()
        elif time.monotonic() >= moved_s + _READ_S:
            topic, partition = place
            raise TailraceError(
                Kind.SOURCE_UNREACHABLE,
                f"read topic {topic}: nothing came for {_READ_S:.0f} s, though messages are there",
                "see whether the brokers run and can be reached from here",
                {"topic": topic, "partition": partition, "offset": before, "end": end},
            )


class KafkaJoinCheck:
    """The preflight: checks that the topics exist, can be read, and have messages that can be joined."""

    def __init__(self, section: KafkaJoinSection) -> None:
        self._section = section
        self._reader: MessageReader | None = None

    def connect(self) -> Iterator[Finding]:
        """Connect."""
        self._reader = reader_of(self._section)
        return iter(())

    def findings(self) -> Iterator[Finding]:
        """Yield the problems of the topics."""
        reader, section = self._reader, self._section
        if reader is None:
            return
        counts: dict[str, int] = {}
        for topic in (*section.data, section.transactions):
            try:
                counts |= reader.partitions_of([topic])
            except TailraceError as found:
                yield from_failure(found)
        if section.transactions in counts:
            try:
                require_one_partition(section.transactions, counts[section.transactions])
                newest(section, reader)
            except TailraceError as found:
                yield from_failure(found)
        for topic in section.data:
            if topic in counts:
                yield from self._of_data(reader, topic, counts[topic])

    def tables(self) -> Sequence[tuple[str, str]]:
        """Return none: tables are known only from the messages."""
        return ()

    def relations(self, wants: Callable[[str, str], bool]) -> Sequence[Relation]:
        """As `tables`."""
        return ()

    def close(self) -> None:
        """Close the connection."""
        if self._reader is not None:
            self._reader.close()

    def _of_data(self, reader: MessageReader, topic: str, partitions: int) -> Iterator[Finding]:
        # The topic's first message shows its form.
        for number in range(partitions):
            place: Place = (topic, number)
            try:
                first, end = reader.first(place), reader.end(place)
                if first >= end:
                    continue
                reader.seek(place, first)
                found = next(_messages(reader, place, end), None)
                reader.pause(place)  # later messages are not checked
            except TailraceError as failure:
                yield from_failure(failure)
                return
            if found is not None:
                key, value = (found.column(name)[0].as_py() for name in ("key", "value"))
                yield from _of_message(self._section, topic, key, value)
                return


def _is_debeziums(section: KafkaJoinSection) -> bool:
    # Otherwise `fields` or `expressions` say where keys are.
    return section.fields is None and section.expressions is None


def _payload(document: Callable[[bytes], tuple[Mapping[str, Any], Any]], message: bytes) -> Any:
    try:
        return document(message)[1]
    except ValueError:
        return None


def _of_message(
    section: KafkaJoinSection, topic: str, key: bytes | None, value: bytes | None
) -> Iterator[Finding]:
    if key is None:
        yield warning(
            Kind.SOURCE_MISCONFIGURED,
            f"topic {topic}: its messages have no key, so changes of a row may be in several partitions",
            "give the table a primary key, or the connector message.key.columns",
        )
    if value is None:
        return
    document = document_of(section)
    try:
        event, key_members = _payload(document, value), {} if key is None else _payload(document, key)
    except TailraceError as failure:
        yield from_failure(failure)
        return
    form = "JSON" if section.registry is None else "Avro, in the wire format of a schema registry"
    if not isinstance(event, dict):
        yield error(
            Kind.SOURCE_MISCONFIGURED,
            f"topic {topic}: its messages are not {form}",
            "see which converter writes the topic: JSON is read without `registry`, Avro with it",
        )
    elif not isinstance(key_members, dict):
        yield error(
            Kind.SOURCE_MISCONFIGURED,
            f"topic {topic}: its keys are not objects in {form}, as its values are",
            "have keys and values written by the same converter, with the key's columns as fields",
        )
    elif _is_debeziums(section) and event.get("op") != "r" and event.get("transaction") is None:
        # A member that is null may be from before transaction metadata was enabled.
        yield (warning if "transaction" in event else error)(
            Kind.SOURCE_MISCONFIGURED,
            f"topic {topic}: its first message names no transaction",
            "set provide.transaction.metadata of the connector that writes it",
        )
