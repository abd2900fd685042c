"""Random responses of VStream give the same changes with the kernel and with plain Python."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tailrace.sources.vitess.connection import vstream_pb2 as pb
from tailrace.sources.vitess.rows.tables import LogTables
from tailrace.sources.vitess.rows.transcoder import Transcoder
from tests.support.examples import examples
from tests.support.vitess import messages as ms
from tests.support.vitess.reading import UNCHANGED, ChangeRead, read

_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_TIMES = st.times().map(lambda time: time.isoformat(timespec="microseconds").encode())

# For each type: the column as MySQL describes it, bytes that VStream sends, and PostgreSQL's text.
_Typed = tuple[tuple[int, str, int], st.SearchStrategy[bytes], Any]


def _plain(value: bytes) -> str:
    return value.decode()


def _number(value: bytes) -> str:
    number = Decimal(value.decode())
    return str(abs(number) if number == 0 else number)


def _float(exponent_max: int) -> Any:
    def text(value: bytes) -> str:
        sign, digits, exponent = Decimal(value.decode()).normalize().as_tuple()
        assert isinstance(exponent, int)
        if digits == (0,):
            return "-0" if sign else "0"
        power = exponent + len(digits) - 1
        letters = "".join(map(str, digits))
        if -4 <= power < exponent_max:
            return format(Decimal((sign, digits, exponent)), "f")
        fraction = f".{letters[1:]}" if len(letters) > 1 else ""
        return f"{'-' if sign else ''}{letters[0]}{fraction}e{'-' if power < 0 else '+'}{abs(power):02}"

    return text


def _binary_log_float(value: float) -> bytes:
    mantissa, exponent = format(Decimal(repr(value)).normalize(), "E").split("E")
    return f"{mantissa}E{int(exponent):+03}".encode()


def _decimal(value: Decimal) -> bytes:
    # As in a binary log: without the digit before the point if it is 0.
    text = format(value or abs(value), ".2f")
    return text.replace("0.", ".", 1).encode() if abs(value) < 1 else text.encode()


_FLOATS = st.floats(allow_nan=False, allow_infinity=False).map(_binary_log_float)
_TYPES: list[_Typed] = [
    ((265, "bigint", 63), st.integers(-(2**63), 2**63 - 1).map(lambda n: str(n).encode()), _plain),
    ((778, "bigint unsigned zerofill", 63), st.integers(0, 2**64 - 1).map(lambda n: b"%020d" % n), _number),
    (
        (18, "decimal(12,2)", 63),
        st.decimals(-(10**9), 10**9, places=2).map(_decimal),
        lambda value: format(
            abs(Decimal(value.decode())) if not Decimal(value.decode()) else Decimal(value.decode()), ".2f"
        ),
    ),
    ((1036, "double", 63), _FLOATS, _float(15)),
    ((1035, "float", 63), _FLOATS, _float(6)),
    ((6165, "varchar(64)", 255), _TEXTS.map(str.encode), _plain),
    ((10262, "varchar(64)", 46), _TEXTS.map(str.encode), _plain),
    ((10260, "blob", 63), st.binary(max_size=20), lambda value: "\\x" + value.hex()),
    ((10264, "binary(6)", 63), st.binary(max_size=6), lambda value: "\\x" + value.hex().ljust(12, "0")),
    (
        (2073, "bit(12)", 63),
        st.integers(0, 2**12 - 1).map(lambda n: n.to_bytes(2, "big")),
        lambda value: format(int.from_bytes(value, "big"), "012b"),
    ),
    ((2063, "time(6)", 63), _TIMES, _plain),
    (
        (2061, "timestamp(6)", 63),
        st.datetimes().map(lambda at: at.isoformat(" ", "microseconds").encode()),
        lambda value: value.decode() + "+00",
    ),
    (
        (6165, "varchar(64)", 8),
        st.text(st.characters(codec="latin-1"), max_size=10).map(lambda text: text.encode("latin-1")),
        lambda value: "".join(
            bytes([byte]).decode("cp1252") if byte not in (0x81, 0x8D, 0x8F, 0x90, 0x9D) else chr(byte)
            for byte in value
        ),
    ),
    ((6163, "text", 54), _TEXTS.map(lambda text: text.encode("utf-16-be")), lambda v: v.decode("utf-16-be")),
]


@st.composite
def _tables(draw: Any) -> tuple[list[ms.ColumnGiven], list[_Typed]]:
    typed = draw(st.lists(st.sampled_from(_TYPES), min_size=1, max_size=6))
    key = draw(st.integers(0, min(2, len(typed))))
    columns = [
        (f"c{place}", number, column_type, ms.PRIMARY if place < key else 0, charset)
        for place, ((number, column_type, charset), _, _) in enumerate(typed)
    ]
    return columns, typed


@st.composite
def _images(draw: Any, columns: list[ms.ColumnGiven], typed: list[_Typed]) -> list[bytes | None]:
    return [
        draw(values if column[3] else st.none() | values)
        for column, (_, values, _) in zip(columns, typed, strict=True)
    ]


def _expected(
    table: str, columns: list[ms.ColumnGiven], typed: list[_Typed], op: str, values: list[Any], old: Any
) -> ChangeRead:
    has_key = any(column[3] for column in columns)
    row = {}
    for place, (column, (_, _, text)) in enumerate(zip(columns, typed, strict=True)):
        value = values[place]
        if value == UNCHANGED:
            value = old[place]
            row[column[0]] = UNCHANGED if value is None else text(value)
            if not has_key and value is None:
                row[column[0]] = None  # the whole row before tells it
        elif op == "d" and has_key and not column[3]:
            row[column[0]] = None
        else:
            row[column[0]] = None if value is None else text(value)
    return ChangeRead(f"shop.{table}", op, row)


@examples(150)
@given(st.data())
def test_the_kernel_gives_the_same_changes_as_plain_python(data: st.DataObject) -> None:
    tables = {f"t{n}": data.draw(_tables()) for n in range(data.draw(st.integers(1, 3)))}
    expected: list[ChangeRead] = []
    responses = []
    told: set[str] = set()
    for number in range(data.draw(st.integers(1, 6))):
        is_copy = data.draw(st.booleans())
        events: list[pb.VEvent] = []
        for table in data.draw(st.lists(st.sampled_from(sorted(tables)), max_size=4)):
            columns, typed = tables[table]
            if table not in told:
                events.append(ms.described(table, columns))
                told.add(table)
            ops = data.draw(st.lists(st.sampled_from("r" if is_copy else "cud"), max_size=3))
            changes = []
            for op in ops:
                before = data.draw(_images(columns, typed)) if op in "ud" else None
                after = data.draw(_images(columns, typed)) if op in "rcu" else None
                sent = None
                if op == "u" and data.draw(st.booleans()):
                    assert after is not None
                    sent = [bool(column[3]) or data.draw(st.booleans()) for column in columns]
                shown: list[Any] = list(after or before or [])
                if sent is not None and after is not None:
                    after = [value if there else None for value, there in zip(after, sent, strict=True)]
                    shown = [value if there else UNCHANGED for value, there in zip(after, sent, strict=True)]
                changes.append(ms.change(before, after, sent))
                expected.append(_expected(table, columns, typed, op, shown, before))
            if is_copy:
                events += [ms.rows(table, [each], time_s=0) for each in changes]
            else:
                events.append(ms.rows(table, changes))
        make = ms.copied if is_copy else ms.transaction
        responses.append(make(*events, gtid=f"MySQL56/a:1-{number}"))
    stream = b"".join(responses)
    places = sorted(data.draw(st.lists(st.integers(0, len(responses)), max_size=2)))
    transcoder = Transcoder(ms.KEYSPACE, ms.SHARD, LogTables({}))
    in_force: dict[str, bytes] = {}
    found: list[ChangeRead] = []
    position = 1
    for first, last in zip([0, *places], [*places, len(responses)], strict=True):
        made = transcoder.transcode(responses[first:last], position)
        found += read(made.frames, in_force, position)
        position = made.position
    assert found == expected
    assert transcoder.kept_bytes == 0
    whole = Transcoder(ms.KEYSPACE, ms.SHARD, LogTables({})).transcode([stream], 1)
    assert read(whole.frames) == expected
