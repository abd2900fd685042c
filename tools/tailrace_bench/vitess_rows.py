"""VStream responses to frames of the log, and these to typed Arrow columns, on one core."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from tailrace.decode.changes import decode_block
from tailrace.errors import Kind, TailraceError
from tailrace.protocol.metadata_frames import schema_frames
from tailrace.sources.vitess.connection import vstream_pb2 as pb
from tailrace.sources.vitess.rows.tables import LogTables
from tailrace.sources.vitess.rows.transcoder import Transcoded, Transcoder
from tailrace_bench.decode import use_one_core
from tailrace_bench.support.report import Result, machine, median

ROWS = 500_000
TURNS = 5

_KEYSPACE, _SHARD, _TABLE = "shop", "-80", "shop.orders"
_ROWS_A_TRANSACTION = 500
_COLUMNS = (
    ("id", 265, "bigint", 3, 63),
    ("what", 6165, "varchar(64)", 0, 255),
    ("counter", 263, "int", 0, 63),
    ("at", 2061, "timestamp(6)", 0, 63),
)
_TIME_S = 1_700_000_000
_SERVER = "0b1cf0f1-6b3e-11ef-8bd5-0242ac120002"

#: Approximate number of responses that a capture transcodes at a time while there is a backlog.
_RESPONSES_AT_ONCE = 64


def measure(rows: int | None = None) -> Result:
    """Measure the CPU time of transcoding responses of `rows` inserts, five times after an uncounted pass.

    The reference reads the same responses with protobuf's own compiled parser, and counts the rows.
    """
    rows = max(_ROWS_A_TRANSACTION, rows or ROWS)
    large = _responses(rows, _ROWS_A_TRANSACTION)
    small = _responses(rows // 10, 1)
    use_one_core()
    bench = _Shard(large[0])
    bench.transcode(large)
    theirs, ours, whole, single = [], [], [], []
    for _ in range(TURNS):
        ours.append(_cpu_s(lambda: bench.transcode(large)))
        theirs.append(_cpu_s(lambda: _count(large)))
        whole.append(_cpu_s(lambda: bench.decode(large)))
        single.append(_cpu_s(lambda: bench.transcode(small)))
    return Result(
        name="vitess_rows",
        value=rows / median(ours),
        unit="rows/s",
        ratio=median([reference / own for own, reference in zip(ours, theirs, strict=True)]),
        reference="protobuf's parser on the same responses, rows counted, one core",
        limit="one core; finding values, writing texts and frames",
        setup=machine()
        | {"rows": rows, "columns": len(_COLUMNS), "rows_a_transaction": _ROWS_A_TRANSACTION, "turns": TURNS},
        details={
            "reference_rows_s": round(rows / median(theirs)),
            "to_typed_columns_rows_s": round(rows / median(whole)),
            "single_row_transactions_s": round(len(small) / median(single)),
            "response_bytes_a_row": round(sum(map(len, large)) / rows),
        },
    )


class _Shard:
    """A shard's transcoder, whose first response describes the table."""

    def __init__(self, first: bytes) -> None:
        self._transcoder = Transcoder(_KEYSPACE, _SHARD, LogTables({}))
        described = self._transcoder.transcode([first], 1)
        self._position = described.position
        self._schema = [frame for _, frame in schema_frames(described.frames)]

    def transcode(self, responses: Sequence[bytes]) -> None:
        """Transcode responses to frames, as many at a time as a capture."""
        for made in self._made(responses):
            if made.is_open:
                raise TailraceError(Kind.INTERNAL, "transcode responses: a transaction is open")

    def decode(self, responses: Sequence[bytes]) -> None:
        """Transcode responses to frames, and decode these to typed columns."""
        for made in self._made(responses):
            for changes in decode_block(made.frames, 0, None, self._schema):
                changes.rows()

    def _made(self, responses: Sequence[bytes]) -> Iterator[Transcoded]:
        for first in range(0, len(responses), _RESPONSES_AT_ONCE):
            made = self._transcoder.transcode(responses[first : first + _RESPONSES_AT_ONCE], self._position)
            self._position = made.position
            yield made


def _responses(rows: int, each: int) -> list[bytes]:
    """Return transactions of `each` inserts; the first response describes the table, too."""
    described = pb.FieldEvent(
        table_name=_TABLE, keyspace=_KEYSPACE, shard=_SHARD, enum_set_string_values=True
    )
    for name, number, column_type, flags, charset in _COLUMNS:
        described.fields.add(name=name, type=number, column_type=column_type, flags=flags, charset=charset)
    found = []
    for first in range(0, rows, each):
        changes = [pb.RowChange(after=_row(key)) for key in range(first, min(first + each, rows))]
        row_event = pb.RowEvent(table_name=_TABLE, keyspace=_KEYSPACE, shard=_SHARD, row_changes=changes)
        position = pb.ShardGtid(keyspace=_KEYSPACE, shard=_SHARD, gtid=f"MySQL56/{_SERVER}:1-{first + 1}")
        events = [
            _event(pb.BEGIN),
            *([] if first else [pb.VEvent(type=pb.FIELD, timestamp=_TIME_S, field_event=described)]),
            pb.VEvent(type=pb.ROW, timestamp=_TIME_S, row_event=row_event),
            _event(pb.VGTID, vgtid=pb.VGtid(shard_gtids=[position])),
            _event(pb.COMMIT),
        ]
        found.append(pb.VStreamResponse(events=events).SerializeToString())
    return found


def _event(kind: pb.EventType, vgtid: pb.VGtid | None = None) -> pb.VEvent:
    return pb.VEvent(type=kind, timestamp=_TIME_S, keyspace=_KEYSPACE, shard=_SHARD, vgtid=vgtid)


def _row(key: int) -> pb.Row:
    what = f"an order of some things, number {key:08}"
    values = [
        str(key),
        what,
        str(key % 1000),
        f"2024-01-01 10:{key // 60 % 60:02}:{key % 60:02}.{key % 10**6:06}",
    ]
    return pb.Row(lengths=[len(value) for value in values], values="".join(values).encode())


def _count(responses: Sequence[bytes]) -> int:
    return sum(
        len(event.row_event.row_changes)
        for response in responses
        for event in pb.VStreamResponse.FromString(response).events
    )


def _cpu_s(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started
