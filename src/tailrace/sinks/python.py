"""The sink `python`: calls a user's function with the changes of the log, in this process.

A range goes through the engine's record processing (decoded and converted on a pool, delivered in order),
and its position is stored with the log, in the list of consumers. The position is also stored while a range
is delivered, so that a long range that is interrupted continues within it. The function is called before
the position is stored: at-least-once delivery, and exactly-once only for functions that skip changes they
already have, by log offset.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailrace.backoff import Backoff
from tailrace.changelog import durable
from tailrace.changelog.directory import LogDirectory, encode_name
from tailrace.changelog.reader import LogReader
from tailrace.changelog.retention.readers import READERS, Readers
from tailrace.config.engine_options import RecordProcessing
from tailrace.config.sections import PythonSinkConfig as PythonConfig
from tailrace.config.source.column_policy import ColumnPolicy
from tailrace.converters.contract import Converter
from tailrace.converters.factory import Converting, build
from tailrace.decode.column_policy import TablePolicy
from tailrace.decode.json.debezium import SourceInfo
from tailrace.engine.processing import (
    Handler,
    Manual,
    ProcessingConfig,
    on_batch,
    on_record,
    processor_for,
)
from tailrace.engine.processing.handlers import takes
from tailrace.engine.threads import Pool, SystemClock
from tailrace.errors import Kind, TailraceError
from tailrace.model import LogRange, ValueModes
from tailrace.ranges.batches import LOG_OFFSET, batches_of, log_offset_of
from tailrace.ranges.changes import DecodedBatch, decoded_batches
from tailrace.records.batch import Batch, Offset
from tailrace.sinks.contract import SinkCommit, first_missing, function_failure
from tailrace.sinks.target import locked, writing
from tailrace.transforms import factory as transformations
from tailrace.transforms.chain import Chain

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tailrace.changelog.directory import LogIdentity
    from tailrace.ranges.plan import InputSplit

#: Interval at which the position is stored while a range is delivered, in seconds.
KEEP_INTERVAL_S = 1.0
_DRAIN_S = 0.5
_THREADS = RecordProcessing().thread_count
#: Batches that are decoded ahead of the function.
_BATCHES_AHEAD = 4


class PythonSink:
    """Calls a function with the changes of a log (`contract.Sink`, except for "exactly once").

    :param log_path: the log's directory, where the position is stored.
    """

    type = "python"

    def __init__(self, config: PythonConfig, log_path: Path, rules: ColumnPolicy, modes: ValueModes) -> None:
        self.name = config.name
        self._config = config
        self._log_path = log_path
        self._rules = rules
        self._modes = modes
        self._handler: Handler | None = None
        self._chain = Chain()
        self._converter: Converter | None = None
        self._origin: SourceInfo | None = None
        self._partition: dict[str, str] = {}
        self._pool: Pool | None = None
        self._lock: int | None = None

    def open(self, log: LogIdentity, pipeline: str) -> None:
        """Find the function, and lock the sink against other processes.

        :raises TailraceError: `SINK_LOCKED`; `CONFIG_INVALID` or `ENVIRONMENT_UNFIT` if there is no
            such function or converter.
        """
        # One for all ranges: objects that an async function's coroutines share belong to its handler's loop.
        self._handler = (on_batch if self._config.batch else on_record)(handler_of(self._config))
        self._chain = transformations.build(
            self._config.transformations,
            self._config.predicates,
            splits_updates=self._config.converter is not None,
        )
        if self._config.converter is not None:
            self._converter = build(self._config.converter.type, self._config.converter.options)
        with writing(self.name, "make the folder of readers"):
            durable.make_directory(self._log_path / READERS)
        file = self._log_path / READERS / f".{encode_name(self.name)}.lock"
        self._lock = locked(file, self.name, self._log_path)
        self._origin = SourceInfo.of(pipeline, log.source)
        self._partition = {"pipeline": pipeline, "slot": log.source.slot}
        self._pool = Pool(_THREADS, f"sink {self.name}", self)

    def position(self, task: str) -> int | None:
        """Return the boundary up to which everything was delivered; records after it may be, too."""
        directory = LogDirectory.open(self._log_path)
        return recorded_python_position(directory, self.name, task)

    def reach(self, task: str) -> int | None:
        directory = LogDirectory.open(self._log_path)
        return _exact(directory, self.name, task)

    def write(
        self, spark: SparkSession | None, log: Path, span: LogRange, splits: Sequence[InputSplit]
    ) -> SinkCommit:
        """Deliver the changes of `span` that were not delivered yet; see `contract.Sink.write`.

        :raises TailraceError: `SINK_WRITE_FAILED` if the function raises: the range is retried;
            `TASK_FAILED` if it raises `StopEngine`, which a sink's function may not.
        """
        directory = LogDirectory.open(log)
        begin = first_missing(self.name, span, _exact(directory, self.name, span.task))
        if begin >= span.end:
            return SinkCommit(span)
        with LogReader.open(directory, span.task) as reader:
            progress = _Progress(directory, reader, self.name, span.task)
            try:
                rows = self._deliver(self._batches(reader, splits, begin), progress)
            finally:
                progress.keep()
            progress.keep_at(span.end)
        return SinkCommit(span, rows, span.end - begin)

    def close(self) -> None:
        """Release threads and lock."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
        chain, self._chain = self._chain, Chain()
        chain.close()
        if self._converter is not None:
            self._converter.close()
            self._converter = None
        self._handler = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _batches(self, reader: LogReader, splits: Sequence[InputSplit], begin: int) -> Iterator[Batch]:
        table_policy = TablePolicy.of(self._rules)
        log_id = LogDirectory.open(self._log_path).identity.log_id
        for split in splits:
            if split.end <= begin:
                continue
            for decoded in decoded_batches(reader, split, None, self._modes, table_policy):
                if decoded.end <= begin:
                    continue  # a delivered part of a transaction: its end would be stored as the position
                wanted = self._wanted(decoded, begin)
                yield from batches_of(
                    self._partition, log_id, wanted, self._config.batch_rows_max, self._origin
                )

    def _wanted(self, decoded: DecodedBatch, begin: int) -> DecodedBatch:
        tables = [
            changes.slice(begin, decoded.end)
            for changes in decoded.changes
            if self._config.wants(
                changes.relation.schema if changes.relation else "",
                changes.relation.table if changes.relation else "",
            )
        ]
        return DecodedBatch(
            [changes for changes in tables if changes.count], decoded.end, decoded.open_at_end
        )

    def _deliver(self, batches: Iterator[Batch], progress: _Progress) -> int:
        assert self._pool is not None
        assert self._handler is not None
        terms = ProcessingConfig(
            handler=self._handler,
            clock=SystemClock(),
            stopping=threading.Event(),
            threads=_THREADS,
            queue_batches_max=_BATCHES_AHEAD,
            # The sink worker retries temporary failures.
            backoff=Backoff(0),
            name=f"sink {self.name}",
        )
        processor = processor_for(terms)
        convert = None if self._converter is None else Converting(self._converter)
        transform = self._chain.apply if len(self._chain) else None
        processor.initialize(self._pool, transform, convert, progress)
        rows = 0
        try:
            for batch in batches:
                rows += len(batch)
                processor.process(batch)
            while not processor.drain(_DRAIN_S):
                pass
        except TailraceError:
            raise
        except Exception as error:
            raise function_failure(error, f"call {self._config.handler}", self.name) from error
        finally:
            processor.close()
        return rows


class _Progress:
    """Stores the function's progress, as the engine's processing reports it (`contracts.Committer`)."""

    def __init__(self, directory: LogDirectory, reader: LogReader, sink: str, task: str) -> None:
        self._readers = Readers(directory)
        self._log_id = directory.identity.log_id
        self._reader = reader
        self._sink = sink
        self._task = task
        self._done: Offset | None = None
        self._kept_s = time.monotonic()

    def mark_processed(self, batch: Batch, place: int | None = None, offset: Offset | None = None) -> None:
        self._done = batch.end if place is None else batch.offsets[place]

    def mark_places(self, batch: Batch, places: Sequence[int]) -> None:
        self._done = batch.offsets[places[-1]]
        self._keep_if_due()  # the end of the batch may be far away

    def mark_dropped(self, batch: Batch) -> None:
        """Do nothing: the next mark, or the end of the range, covers dropped records."""

    def mark_batch_finished(self, batch: Batch) -> None:
        self._keep_if_due()

    def _keep_if_due(self) -> None:
        if time.monotonic() - self._kept_s >= KEEP_INTERVAL_S:
            self.keep()

    def keep(self) -> None:
        """Store the offset that was marked last."""
        if self._done is not None:
            self.keep_at(log_offset_of(self._done, self._log_id))

    def keep_at(self, log_offset: int) -> None:
        """Record durably that everything before `log_offset` was delivered."""
        boundary = self._reader.boundary_up_to(log_offset)
        self._readers.commit(self._sink, self._task, boundary, {LOG_OFFSET: log_offset})
        self._kept_s = time.monotonic()


def handler_of(config: PythonConfig) -> Callable[..., Any]:
    """Return the function that a sink calls.

    :raises TailraceError: `CONFIG_INVALID`; of an error of the import, only the type is shown.
    """
    module, _, name = config.handler.partition(":")
    directory = os.fspath(config.python_path.absolute())
    if directory not in sys.path:
        sys.path.append(directory)
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"find the handler {config.handler}: importing {module} raised {type(error).__name__}",
            f"the module is searched in Python's path, and in {directory} (python_path)",
            {"sink": config.name},
        ) from error
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"find the handler {config.handler}: {module} has no function {name}",
            "correct the sink's handler: package.module:function",
            {"sink": config.name},
        )
    if isinstance(found, Manual):
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"find the handler {config.handler}: it is `manual`, and a sink's position is stored when its "
            "function has returned, whatever was marked",
            "name the function without manual, and let it return when its work is done; or use "
            "tailrace.Engine(on_batch=manual(…))",
            {"sink": config.name},
        )
    if not takes(found, 1):
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"find the handler {config.handler}: it can't be called with one argument",
            f"let it take a {'batch' if config.batch else 'record'} alone",
            {"sink": config.name},
        )
    function: Callable[..., Any] = found
    return function


def recorded_python_position(directory: LogDirectory, sink: str, task: str) -> int | None:
    """Return the boundary up to which everything was delivered to a sink's function; None: there is none.

    :raises TailraceError: `LOG_CORRUPT`.
    """
    exact = _exact(directory, sink, task)
    if exact is None:
        return None
    with LogReader.open(directory, task) as reader:
        if not reader.start <= exact <= reader.end().offset:
            return exact
        return reader.boundary_up_to(exact)


def _exact(directory: LogDirectory, sink: str, task: str) -> int | None:
    reader = Readers(directory).get(sink)
    kept = None if reader is None else reader.kept.get(task)
    return None if kept is None else int(kept[LOG_OFFSET])
