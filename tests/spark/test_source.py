"""The data source on a real Spark: batches, streams, restarts, changing tables, wrong logs."""

from __future__ import annotations

import datetime as dt
import os
import shutil
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import StructType

from tailrace.changelog.disclosure import keep_disclosure
from tailrace.changelog.retention.policy import RetentionRules
from tailrace.changelog.retention.prune import apply
from tailrace.changelog.retention.readers import Readers
from tailrace.changelog.writer import LogOptions
from tailrace.config import ColumnPolicy
from tailrace.errors import Kind, TailraceError
from tailrace.protocol import frames
from tailrace.protocol.facts import ColumnFacts, Facts
from tailrace.ranges import changes as changes_module
from tailrace.spark import datasource, register
from tailrace.spark.datasource import StreamReader, TailraceDataSource
from tailrace.spark.jobs import on_every_core, translated
from tailrace.spark.options import ReadOptions
from tests.support.spark.wire import (
    BOOL,
    INT4,
    INT8,
    TEXT,
    TIMESTAMPTZ,
    UNCHANGED,
    HandmadeLog,
    delete,
    insert,
    message,
    numeric,
    relation,
    truncate,
    update,
)

MONEY, INTERVAL, BYTEA = 790, 1186, 17
ORDERS = relation(1, "public.orders", {"id": INT8, "price": numeric(12, 2), "note": TEXT})
ITEMS = relation(2, "public.items", {"id": INT4})


@pytest.fixture
def log(tmp_path: Path) -> Iterator[HandmadeLog]:
    with HandmadeLog(tmp_path / "log") as log:
        yield log


@pytest.fixture
def log_in_segments(tmp_path: Path) -> Iterator[HandmadeLog]:
    """A log with a segment for each transaction."""
    with HandmadeLog(tmp_path / "log", options=LogOptions(segment_bytes=1)) as log:
        yield log


def read(spark: Any, log: HandmadeLog, **options: Any) -> Any:
    return spark.read.format("tailrace").options(**options).load(str(log.path))


def fill(log: HandmadeLog, transactions: int, rows: int = 3, first: int = 0) -> None:
    """Each transaction inserts `rows` orders and one item."""
    for t in range(first, first + transactions):
        shapes = [ORDERS, ITEMS] if t == first else []
        orders = [insert(1, str(t * rows + k), "1.50", f"note {t}") for k in range(rows)]
        log.commit(*shapes, *orders, insert(2, str(t)))


class Stream:
    """A query that stops at the log's present end; `batches` has the rows of each micro-batch."""

    def __init__(self, spark: Any, log: HandmadeLog, checkpoint: Path, **options: Any) -> None:
        self.batches: list[list[Any]] = []
        frame = spark.readStream.format("tailrace").options(**options).load(str(log.path))
        self.columns = frame.columns
        self.query = (
            frame.writeStream.foreachBatch(lambda batch, _: self.batches.append(batch.collect()))
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )

    def run(self) -> Stream:
        try:
            assert self.query.awaitTermination(60), "the stream did not end"
        finally:
            self.query.stop()
        return self

    @property
    def rows(self) -> list[Any]:
        return [row for batch in self.batches for row in batch]


def as_planned(log: HandmadeLog, **options: str) -> StreamReader:
    """Return a stream's reader as Spark's driver creates one at each start of a query."""
    return StreamReader(ReadOptions.parse({"path": str(log.path), "task": "0", **options}), StructType())


def test_the_source_works_with_and_without_registration(spark: Any, log: HandmadeLog) -> None:
    fill(log, 1)
    assert read(spark, log).count() == 4
    register(spark)
    assert read(spark, log).count() == 4


def test_envelopes_have_every_change_in_order(spark: Any, log: HandmadeLog) -> None:
    log.commit(ORDERS, insert(1, "1", "2.50", None), update(1, "1", "3", UNCHANGED))
    log.append(message(1160, "audit", b"hello"))
    log.commit(ITEMS, delete(1, "1", None, None), truncate(1, 2))
    rows = read(spark, log).orderBy("log_offset").collect()
    assert [row.op for row in rows] == ["c", "u", "m", "d", "t", "t"]
    assert [row.table for row in rows] == ["orders", "orders", None, "orders", "orders", "items"]
    assert [row.ordinal for row in rows] == [0, 1, 0, 0, 1, 2]
    assert rows[0].after == {"id": "1", "price": "2.50", "note": None}
    assert rows[1].after == {"id": "1", "price": "3"}
    assert (rows[1].key, rows[3].key, rows[3].before) == ({"id": "1"}, {"id": "1"}, {"id": "1"})
    assert (rows[2].message_prefix, bytes(rows[2].message_content)) == ("audit", b"hello")
    assert rows[0].commit_ts == dt.datetime(2026, 1, 1, 0, 0, 1)  # noqa: DTZ001 — Spark hands naive times over


def test_envelopes_can_be_queried_by_column(spark: Any, log: HandmadeLog) -> None:
    fill(log, 2)
    frame = read(spark, log).where("`table` = 'orders' and cast(after['id'] as int) >= 4")
    assert frame.selectExpr("sum(cast(after['price'] as decimal(12,2))) as total").first().total == Decimal(
        "3.00"
    )


def test_rows_of_a_table_have_its_types_and_the_metadata_of_changes(spark: Any, log: HandmadeLog) -> None:
    log.commit(ORDERS, insert(1, "1", "2.50", "a"), update(1, "1", "3", UNCHANGED))
    log.commit(ITEMS, insert(2, "9"), delete(1, "1", None, None))
    rows = read(spark, log, table="public.orders").orderBy("_log_offset").collect()
    assert [(row.id, row.price, row.note) for row in rows] == [
        (1, Decimal("2.50"), "a"),
        (1, Decimal("3.00"), None),
        (1, None, None),
    ]
    assert [(row._op, row._ordinal, row._unchanged) for row in rows] == [
        ("c", 0, []),
        ("u", 1, ["note"]),
        ("d", 1, []),
    ]
    assert [row._commit_lsn for row in rows] == [1100, 1100, 1200]
    assert [row._xid for row in rows] == [701, 701, 702]


def test_a_table_that_changes_inside_the_range_has_one_schema(spark: Any, log: HandmadeLog) -> None:
    log.commit(relation(1, "public.t", {"id": INT4, "kept": BOOL, "gone": TEXT}), insert(1, "1", "t", "x"))
    log.commit(
        relation(1, "public.t", {"id": INT8, "kept": TIMESTAMPTZ, "new": INT4}),
        insert(1, "5000000000", "2026-01-01 00:00:00+00", "7"),
    )
    frame = read(spark, log, table="public.t").orderBy("_log_offset")
    assert [field.dataType.simpleString() for field in frame.schema[:4]] == [
        "bigint",
        "string",
        "string",
        "int",
    ]
    assert [tuple(row[:4]) for row in frame.collect()] == [
        (1, "t", "x", None),
        (5_000_000_000, "2026-01-01 00:00:00+00", None, 7),
    ]


def test_a_frame_that_is_evaluated_twice_reads_the_same_range(spark: Any, log: HandmadeLog) -> None:
    fill(log, 2)
    frame = read(spark, log)
    assert frame.count() == 8
    fill(log, 1, first=2)
    assert frame.count() == 8
    assert read(spark, log).count() == 12


def test_a_frame_that_starts_in_the_future_stays_empty(spark: Any, log: HandmadeLog) -> None:
    """Later commits may reach that time; the range was fixed before them, start and end."""
    fill(log, 1)
    frames = [
        read(spark, log, startingOffset=place) for place in ("2026-01-01T00:00:02Z", "latest", "LATEST ")
    ]
    fill(log, 2, first=1)
    assert [frame.count() for frame in frames] == [0, 0, 0]


def test_a_range_may_be_given_by_offset_position_or_time(spark: Any, log: HandmadeLog) -> None:
    first = log.commit(ORDERS, insert(1, "1", "1", ""))
    second = log.commit(insert(1, "2", "1", ""))
    log.commit(insert(1, "3", "1", ""))

    def ids(**options: Any) -> list[int]:
        return [row.id for row in read(spark, log, table="public.orders", **options).orderBy("id").collect()]

    assert ids(startingOffset=first, endingOffset=second) == [2]
    assert ids(startingOffset="0/47E") == [2, 3]  # 1150: the end of the first transaction
    assert ids(endingOffset="0/47E") == [1]
    assert ids(startingOffset="2026-01-01T00:00:02Z") == [2, 3]
    assert ids(startingOffset="2026-01-01 01:00:03+01:00") == [3]
    assert ids(startingOffset="latest") == []
    assert ids(startingOffset=second, endingOffset=second) == []
    for behind in (second, "2026-01-01T00:00:03Z", "latest"):
        with pytest.raises(Exception, match=f"after endingOffset, {first}"):
            ids(startingOffset=behind, endingOffset=first)


def test_a_position_after_the_logs_end_is_refused_until_it_is_reached(log: HandmadeLog) -> None:
    """A stream would return the changes before it, and a batch would lack them."""
    fill(log, 1)
    query = as_planned(log, startingOffset="0/4E2")  # 1250: the end of the second transaction
    with pytest.raises(TailraceError, match="it has reached 0/47E") as caught:
        query.initialOffset()
    assert caught.value.kind is Kind.LOG_RANGE_INVALID
    assert "wait" in caught.value.hint
    fill(log, 1, first=1)
    second = log.writer.durable.offset
    fill(log, 1, first=2)
    assert query.initialOffset()["offset"] == second


def test_a_stream_continues_from_its_checkpoint_and_without_one_from_the_start(
    spark: Any, log: HandmadeLog, tmp_path: Path
) -> None:
    fill(log, 2)
    checkpoint = tmp_path / "checkpoint"
    assert len(Stream(spark, log, checkpoint).run().rows) == 8
    fill(log, 1, first=2)
    assert {row.xid for row in Stream(spark, log, checkpoint).run().rows} == {703}
    assert Stream(spark, log, checkpoint).run().rows == []
    shutil.rmtree(checkpoint)
    assert len(Stream(spark, log, checkpoint).run().rows) == 12
    shutil.rmtree(checkpoint)
    assert Stream(spark, log, checkpoint, startingOffset="latest").run().rows == []
    fill(log, 1, first=3)
    assert {row.xid for row in Stream(spark, log, checkpoint, startingOffset="latest").run().rows} == {704}


@pytest.mark.parametrize("starting", ["latest", "earliest"])
def test_a_first_batch_that_was_planned_is_the_same_after_a_restart(log: HandmadeLog, starting: str) -> None:
    """Until its first batch is done, Spark asks for the initial offset at each start of a query."""
    fill(log, 1)
    before = as_planned(log, startingOffset=starting)
    fill(log, 1, first=1)
    begin = before.initialOffset()
    fill(log, 1, first=2)
    end = before.latestOffset(begin, ReadAllAvailable())
    fill(log, 1, first=3)
    after = as_planned(log, startingOffset=starting)
    splits = [each.value[0] for each in after.partitions(after.initialOffset(), end)]
    assert (splits[0].start, splits[-1].end) == (begin["offset"], end["offset"])
    follows = after.latestOffset(end, ReadAllAvailable())
    splits = [each.value[0] for each in after.partitions(end, follows)]
    assert (splits[0].start, splits[-1].end) == (end["offset"], log.writer.durable.offset)
    assert after.partitions(follows, follows) == []


def test_a_first_batch_whose_start_retention_has_removed_is_refused(spark: Any, tmp_path: Path) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("the target is away")

    checkpoint = tmp_path / "checkpoint"
    with HandmadeLog(tmp_path / "log", options=LogOptions(segment_bytes=1)) as log:
        fill(log, 3)
        frame = spark.readStream.format("tailrace").load(str(log.path))
        query = (
            frame.writeStream.foreachBatch(fails)
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        with pytest.raises(Exception, match="the target is away"):
            query.awaitTermination(60)
        assert apply(log.directory, "0", RetentionRules(size_bytes=1)).segments
        with pytest.raises(Exception, match="log_range_gone"):
            Stream(spark, log, checkpoint).run()


@pytest.mark.follows("log_range_gone")
def test_a_stream_that_retention_overtook_begins_with_what_is_there(log_in_segments: HandmadeLog) -> None:
    log = log_in_segments
    fill(log, 1)
    query = as_planned(log)
    kept = query.latestOffset(query.initialOffset(), ReadAllAvailable())
    fill(log, 3, first=1)
    assert apply(log.directory, "0", RetentionRules(size_bytes=1)).segments
    with pytest.raises(TailraceError, match="log_range_gone") as caught:
        query.latestOffset(kept, ReadAllAvailable())
    assert "startingOffset earliest, a stream also with a new checkpoint" in caught.value.hint
    again = as_planned(log, startingOffset="earliest")
    begin = again.initialOffset()
    assert again.partitions(begin, again.latestOffset(begin, ReadAllAvailable()))
    with pytest.raises(TailraceError, match="log_range_gone") as caught:
        list(rows_of(log, startingOffset="0"))
    assert "startingOffset earliest" in caught.value.hint
    assert list(rows_of(log, startingOffset="earliest"))


def test_a_checkpoint_of_a_query_of_another_table_is_refused(
    spark: Any, log: HandmadeLog, tmp_path: Path
) -> None:
    """Its changes before the checkpoint would be missing."""
    fill(log, 2)
    Stream(spark, log, tmp_path / "checkpoint", table="public.orders").run()
    middle = log.writer.durable.offset
    fill(log, 1, first=2)
    for options in ({"table": "public.items"}, {}):
        with pytest.raises(Exception, match="log_foreign") as caught:
            Stream(spark, log, tmp_path / "checkpoint", **options).run()
        assert f"startingOffset {middle}" in translated(caught.value).hint
    items = {"table": "public.items", "startingOffset": middle}
    assert len(Stream(spark, log, tmp_path / "another", **items).run().rows) == 1


def test_a_checkpoint_of_an_older_version_without_the_table_is_accepted(log: HandmadeLog) -> None:
    fill(log, 1)
    query = as_planned(log, table="public.orders")
    kept = query.initialOffset()
    del kept["table"]
    assert query.latestOffset(kept, ReadAllAvailable())["offset"] == log.writer.durable.offset


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"maxRowsPerTrigger": 9}, [8, 8, 8, 4]),
        ({"maxRowsPerTrigger": 1}, [4] * 7),  # a transaction is never split
        ({"maxBytesPerTrigger": 1}, [4] * 7),
        ({"maxRowsPerTrigger": 1000, "maxBytesPerTrigger": 1}, [4] * 7),
        ({}, [28]),
    ],
)
def test_batches_keep_the_limits_and_end_with_transactions(
    spark: Any, log: HandmadeLog, tmp_path: Path, options: dict[str, int], sizes: list[int]
) -> None:
    fill(log, 7)
    stream = Stream(spark, log, tmp_path / "checkpoint", **options).run()
    assert [len(batch) for batch in stream.batches] == sizes
    transactions = [{row.xid for row in batch} for batch in stream.batches]
    assert sum(map(len, transactions)) == len(set().union(*transactions)) == 7


@pytest.mark.follows("schema_changed")
def test_a_new_column_stops_a_stream_and_is_there_after_a_restart(
    spark: Any, log: HandmadeLog, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    fill(log, 1)
    frame = spark.readStream.format("tailrace").option("table", "public.orders").load(str(log.path))
    wider = relation(1, "public.orders", {"id": INT8, "price": numeric(12, 2), "note": TEXT, "new": BOOL})
    log.commit(wider, insert(1, "100", "1", "", "t"))
    query = (
        frame.writeStream.format("noop")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    with pytest.raises(Exception, match="schema_changed") as caught:
        query.awaitTermination(60)
    error = translated(caught.value)
    assert error.kind is Kind.SCHEMA_CHANGED
    assert "column 'new' is new" in error.message
    assert "start the query again, with the same checkpoint" in error.hint
    restarted = Stream(spark, log, checkpoint, table="public.orders").run()
    assert "new" in restarted.columns
    assert [row.new for row in restarted.rows if row.id == 100] == [True]
    assert len(restarted.rows) == 4


def test_a_checkpoint_of_another_log_is_refused(spark: Any, log: HandmadeLog, tmp_path: Path) -> None:
    fill(log, 1)
    checkpoint = tmp_path / "checkpoint"
    Stream(spark, log, checkpoint).run()
    with HandmadeLog(tmp_path / "other", slot="another") as other:
        fill(other, 2)
        with pytest.raises(Exception, match="log_foreign") as caught:
            Stream(spark, other, checkpoint).run()
    assert translated(caught.value).kind is Kind.LOG_FOREIGN


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"table": "public.order"}, Kind.TABLE_UNKNOWN, "public.orders"),
        ({"tabel": "public.orders"}, Kind.CONFIG_INVALID, "did you mean table?"),
        ({"task": "7"}, Kind.LOG_MISSING, "no task '7'"),
        ({"startingOffset": "99999999"}, Kind.LOG_RANGE_INVALID, "it is durable from"),
        ({"startingOffset": "yesterday"}, Kind.CONFIG_INVALID, "LSN such as"),
        ({"maxRowsPerTrigger": "5"}, Kind.CONFIG_INVALID, "an option of streams"),
    ],
)
def test_a_log_that_cannot_be_read_is_an_error_with_kind_and_hint(
    spark: Any, log: HandmadeLog, options: dict[str, str], kind: Kind, words: str
) -> None:
    fill(log, 1)
    with pytest.raises(Exception, match=str(kind)) as caught:
        read(spark, log, **options).count()
    error = translated(caught.value)
    assert error.kind is kind
    assert words in str(error)


@pytest.mark.follows("table_unknown")
@pytest.mark.parametrize("wrong", ["public.order", "nothing.at_all"])
def test_a_missing_table_is_refused_with_the_names_of_those_in_the_log(
    spark: Any, log: HandmadeLog, wrong: str
) -> None:
    fill(log, 1)
    with pytest.raises(Exception, match="table_unknown") as caught:
        read(spark, log, table=wrong).count()
    names = translated(caught.value).hint.partition("known here: ")[2].split(", ")
    assert read(spark, log, table=next(name for name in names if "orders" in name)).count() == 3


@pytest.mark.follows("decode_failed")
def test_a_table_with_a_reserved_column_name_is_read_in_another_form_or_excluded(
    spark: Any, log: HandmadeLog
) -> None:
    log.commit(ORDERS, relation(9, "public.odd", {"id": INT4, "_op": TEXT}))
    log.commit(insert(9, "1", "x"), insert(1, "1", "2.50", "a"))
    with pytest.raises(Exception, match="decode_failed") as caught:
        read(spark, log, table="public.odd").count()
    hint = translated(caught.value).hint
    assert "or exclude the table; the envelope and JSON forms can hold it" in hint
    assert read(spark, log, table="public.orders").count() == 1
    envelope, *_ = read(spark, log).where("`table` = 'odd'").collect()
    assert envelope.after == {"id": "1", "_op": "x"}


@pytest.mark.follows("log_range_invalid")
@pytest.mark.parametrize("wrong", ["beyond", "inside"])
def test_an_offset_that_is_no_boundary_is_corrected_by_the_hint(
    spark: Any, log: HandmadeLog, wrong: str
) -> None:
    fill(log, 1)
    place = log.writer.tail.offset
    fill(log, 1, first=1)
    with pytest.raises(Exception, match="log_range_invalid") as caught:
        read(spark, log, startingOffset=str(place + (1 if wrong == "inside" else 1_000_000))).count()
    if wrong == "inside":
        assert f"the transaction begins at {place}: use that" in translated(caught.value).hint
    assert read(spark, log, startingOffset=str(place)).count() == 4


def test_a_folder_without_a_log_is_refused(spark: Any, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="log_missing"):
        spark.read.format("tailrace").load(str(tmp_path)).count()


def test_damage_found_by_an_executor_is_reported_with_file_and_hint(spark: Any, log: HandmadeLog) -> None:
    fill(log, 3)
    (segment,) = log.path.glob("tasks/0/*.seg")
    frame = read(spark, log)
    content = bytearray(segment.read_bytes())
    at = content.index(b"note 2")
    content[at] ^= 1
    segment.write_bytes(content)
    with pytest.raises(Exception, match="log_corrupt") as caught:
        frame.collect()
    error = translated(caught.value)
    assert error.kind is Kind.LOG_CORRUPT
    assert error.context["file"].endswith(segment.name)
    assert error.hint


def test_retention_keeps_what_a_named_reader_has_not_read(
    spark: Any, log: HandmadeLog, tmp_path: Path
) -> None:
    fill(log, 2)
    middle = log.writer.durable.offset
    Stream(spark, log, tmp_path / "checkpoint", readerName="dashboards").run()
    fill(log, 1, first=2)
    Stream(spark, log, tmp_path / "checkpoint", readerName="dashboards").run()
    (reader,) = Readers.open(log.path).all()
    assert (reader.name, reader.offsets["0"] >= middle) == ("dashboards", True)


def test_retention_keeps_what_a_restarted_named_reader_needs(log: HandmadeLog) -> None:
    """A query with a new checkpoint, with the reader's name of the one before."""
    fill(log, 2)
    Readers.open(log.path).register("dashboards", {"0": log.writer.durable.offset})
    query = as_planned(log, readerName="dashboards")
    query.latestOffset(query.initialOffset(), ReadAllAvailable())
    assert Readers.open(log.path).require("dashboards").offsets == {"0": 0}


JOB = """
import sys
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
frame = spark.readStream.format("tailrace").option("table", "public.orders").load(sys.argv[1])
query = frame.writeStream.format("parquet").option("path", sys.argv[2])
query.option("checkpointLocation", sys.argv[3]).trigger(availableNow=True).start().awaitTermination()
print(spark.read.parquet(sys.argv[2]).count())
"""


@pytest.mark.slow
def test_a_users_spark_job_reads_the_log(log: HandmadeLog, tmp_path: Path) -> None:
    fill(log, 5)
    script = tmp_path / "job.py"
    script.write_text(JOB)
    arguments = [str(log.path), str(tmp_path / "out"), str(tmp_path / "checkpoint")]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True, text=True, timeout=240, env=environment, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "15"


def test_translated_returns_tailrace_errors_unchanged() -> None:
    error = TailraceError(Kind.LOG_FULL, "x")
    assert translated(error) is error


@pytest.mark.follows("spark_failed")
def test_the_cause_of_a_failed_job_has_the_original_message(spark: Any) -> None:
    def look(name: str, _: Any) -> Iterator[bool]:
        yield {"here": True}[name]

    with pytest.raises(TailraceError) as caught:
        on_every_core(spark, partial(look, "there"))
    error = caught.value
    assert error.kind is Kind.SPARK_FAILED
    assert "the cause of this error has Spark's message and its stack trace" in error.hint
    words = "".join(traceback.format_exception(error.__cause__))
    assert "KeyError: 'there'" in words
    assert "in look" in words
    assert set(on_every_core(spark, partial(look, "here"))) == {True}


def test_values_as_text_have_the_form_of_the_handling_modes(spark: Any, log: HandmadeLog) -> None:
    """Also in a column that had another type before; its older values are PostgreSQL's text."""
    columns: dict[str, Any] = {"id": INT8, "price": MONEY, "every": INTERVAL, "data": BYTEA}
    log.commit(relation(1, "public.t", {**columns, "data": BOOL}), insert(1, "1", "$1,234.56", "1 day", "t"))
    log.commit(relation(1, "public.t", columns), insert(1, "2", "$2.00", "02:00:00", "\\xfb"))
    modes = {"decimalHandlingMode": "string", "intervalHandlingMode": "string"}
    frame = read(spark, log, table="public.t", binaryHandlingMode="base64", **modes)
    rows = frame.orderBy("id").collect()
    assert [(row.price, row.every) for row in rows] == [
        ("1234.56", "P0Y0M1DT0H0M0S"),
        ("2.00", "P0Y0M0DT2H0M0S"),
    ]
    assert [row.data for row in rows] == ["t", "+w=="]


def items_pending(pending: int) -> bytes:
    columns = (ColumnFacts("id", 1, type_oid=INT8, base_oid=INT8),)
    found = Facts(2, "public", "items", ("id",), columns, version=1, pending=pending)
    return frames.control_frame(frames.FACTS, 1, 0, found.as_json())


def rows_of(log: HandmadeLog, **options: str) -> Iterator[Any]:
    """Yield the batches of a read, as a task reads them."""
    source = TailraceDataSource({"path": str(log.path), **options})
    reader = source.reader(source.schema())
    (partition,) = reader.partitions()
    return reader.read(partition)


def test_reading_an_altered_table_waits_until_the_catalogue_shows_the_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes_module, "PENDING_S", 0.1)
    with HandmadeLog(tmp_path / "log", options=LogOptions(segment_bytes=1)) as log:
        fill(log, 2)
        log.commit(items_pending(7), ITEMS, insert(2, "7"))
        settling = threading.Timer(1.0, lambda: log.commit(items_pending(0)))
        settling.start()
        batches = [batch["id"].to_pylist() for batch in rows_of(log, table="public.items")]
        settling.join()
    assert [number for batch in batches for number in batch] == [0, 1, 7]


def test_the_wait_for_an_altered_table_has_a_timeout(
    log: HandmadeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.commit(items_pending(7), ITEMS, insert(2, "7"))
    monkeypatch.setattr(datasource, "_PENDING_S_MAX", 0.0)
    with pytest.raises(TailraceError) as caught:
        list(rows_of(log, table="public.items"))
    assert caught.value.kind is Kind.SCHEMA_PENDING


def test_a_table_is_read_whatever_is_wrong_with_another_one(
    log: HandmadeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasource, "_PENDING_S_MAX", 0.0)
    secrets = relation(3, "public.secrets", {"id": INT8})
    rows = insert(2, "7"), insert(3, "3"), insert(1, "1", "1.50", "x")
    log.commit(items_pending(7), ITEMS, secrets, ORDERS, *rows)
    rules = ColumnPolicy.model_validate({"columns_exclude": ["public.secrets.id"]})
    keep_disclosure(log.directory, "0", rules)
    assert [batch["id"].to_pylist() for batch in rows_of(log, table="public.orders")] == [[1]]
    for table, kind in [("public.items", Kind.SCHEMA_PENDING), ("public.secrets", Kind.CONFIG_INVALID)]:
        with pytest.raises(TailraceError) as caught:
            list(rows_of(log, table=table))
        assert caught.value.kind is kind


def test_a_table_that_has_a_name_only_within_a_block_is_found(log: HandmadeLog) -> None:
    names = [relation(2, f"public.{name}", {"id": INT4}) for name in ("old", "items", "new", "items")]
    log.commit(*(frame for n, name in enumerate(names) for frame in (name, insert(2, str(n)))))
    assert [batch["id"].to_pylist() for batch in rows_of(log, table="public.items")] == [[1], [3]]


def test_a_stream_stops_before_rows_of_a_table_that_gets_the_same_name_with_its_schema(
    log: HandmadeLog,
) -> None:
    log.commit(relation(2, "a.b.c", {"id": INT4}), insert(2, "1"))
    source = TailraceDataSource({"path": str(log.path), "table": "a.b.c"})
    reader = source.streamReader(source.schema())
    begun = reader.initialOffset()
    other = relation(3, "a.b.c", {"id": INT4}).replace(b"a\0b.c\0", b"a.b\0c\0")
    log.commit(other, insert(3, "2"))
    (partition,) = reader.partitions(begun, reader.latestOffset(begun, ReadAllAvailable()))
    with pytest.raises(TailraceError, match=r"schemas a, a\.b have such a table"):
        list(reader.read(partition))


def test_an_executor_without_the_log_is_named(log: HandmadeLog) -> None:
    log.commit(ITEMS, insert(2, "7"))
    batches = rows_of(log, table="public.items")
    os.rename(log.path, f"{log.path}.elsewhere")
    with pytest.raises(
        TailraceError, match=r"the log on the Spark executor on .*: there is no log"
    ) as caught:
        list(batches)
    assert caught.value.kind is Kind.ENVIRONMENT_UNFIT
    os.rename(f"{log.path}.elsewhere", log.path)


def test_a_schema_set_in_the_query_is_refused(spark: Any, log: HandmadeLog) -> None:
    fill(log, 1)
    for given, options in (("id bigint, _op string", {"table": "public.orders"}), ("op string", {})):
        read = spark.read.format("tailrace").schema(given).options(**options)
        with pytest.raises(Exception, match="config_invalid") as caught:
            read.load(str(log.path)).collect()
        assert "remove .schema(…)" in translated(caught.value).hint
    stream = spark.readStream.format("tailrace").schema("op string").load(str(log.path))
    query = stream.writeStream.format("noop").trigger(availableNow=True).start()
    with pytest.raises(Exception, match="sets a schema"):
        query.awaitTermination(60)


@pytest.mark.parametrize("options", [{}, {"table": "public.orders"}])
def test_what_is_not_for_a_query_causes_no_micro_batch(log: HandmadeLog, options: dict[str, str]) -> None:
    fill(log, 2)
    query = as_planned(log, readerName="dashboards", **options)
    done = query.latestOffset(query.initialOffset(), ReadAllAvailable())
    log.append(frames.control_frame(frames.PROGRESS, 1260, 0, {}))
    if options:
        log.commit(insert(2, "7"))
        log.commit(relation(2, "public.items", {"id": INT4, "more": TEXT}), insert(2, "8", ""))
    log.writer.sync()
    assert query.latestOffset(done, ReadAllAvailable()) == done
    # Nor does it delay retention.
    assert Readers.open(log.path).require("dashboards").offsets == {"0": done["offset"]}
    log.commit(insert(1, "9", "1", ""))
    follows = query.latestOffset(done, ReadAllAvailable())
    assert follows["offset"] == log.writer.durable.offset


@pytest.mark.parametrize("options", [{}, {"table": "public.orders"}])
def test_what_is_not_for_a_query_is_passed_together_with_what_follows_whatever_the_limits(
    log: HandmadeLog, options: dict[str, str]
) -> None:
    fill(log, 2)
    query = as_planned(log, maxRowsPerTrigger="2", **options)
    done = query.latestOffset(query.initialOffset(), ReadAllAvailable())
    for number in range(3):
        log.append(frames.control_frame(frames.PROGRESS, 1260 + number, 0, {}))
    for number in range(3 * bool(options)):
        log.commit(insert(2, str(number)))
    log.commit(insert(1, "9", "1", ""), insert(1, "10", "1", ""))
    first = log.writer.durable.offset
    log.commit(insert(1, "11", "1", ""))
    follows = query.latestOffset(done, ReadMaxRows(2))
    assert follows["offset"] == first
    assert query.latestOffset(follows, ReadMaxRows(2))["offset"] == log.writer.durable.offset


def test_a_stream_with_limits_passes_what_is_not_for_it_for_a_limited_time(
    log: HandmadeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasource, "_PASSING_S_MAX", -1.0)
    fill(log, 2)
    query = as_planned(log, maxRowsPerTrigger="1", table="public.orders")
    at = query.latestOffset(query.initialOffset(), ReadAllAvailable())
    for change in (insert(2, "1"), insert(2, "2"), insert(1, "9", "1", "")):
        log.commit(change)
        expected = log.writer.durable.offset
        log.commit(insert(1, "10", "1", ""))
        at = query.latestOffset(at, ReadMaxRows(1))
        assert at["offset"] == expected
        at = query.latestOffset(at, ReadMaxRows(1))


def test_a_description_under_the_name_of_a_querys_table_causes_a_micro_batch(log: HandmadeLog) -> None:
    fill(log, 2)
    query = as_planned(log, table="public.orders")
    done = query.latestOffset(query.initialOffset(), ReadAllAvailable())
    log.commit(relation(2, "public.orders", {"id": INT4}), insert(2, "7"), ITEMS)
    assert query.latestOffset(done, ReadAllAvailable())["offset"] == log.writer.durable.offset


def test_what_is_not_for_a_query_is_passed_with_each_segment_of_the_log(
    log_in_segments: HandmadeLog,
) -> None:
    log = log_in_segments
    fill(log, 2)
    query = as_planned(log, table="public.orders")
    done = query.latestOffset(query.initialOffset(), ReadAllAvailable())
    for number in range(2):
        log.commit(insert(2, str(number)))
    assert query.latestOffset(done, ReadAllAvailable())["offset"] == log.writer.durable.offset
