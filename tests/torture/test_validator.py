"""The validator accepts a good history and finds each way to spoil one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from tests.support.torture.ledger import ACCOUNTS, COUNTERS, LEDGER_SUM, OPENING_BALANCE, TABLES
from tests.support.torture.sinks import Change, read_history, read_mirror
from tests.support.torture.validator import State, history_problems, mirror_problems

SNAPSHOT_LSN = 0x100


def _change(table: str, op: str, lsn: int, ordinal: int, **values: Any) -> Change:
    return Change(table, op, values, lsn, ordinal, 1_000 * lsn + 10 * ordinal, f"{table}.file")


def _snapshot() -> Iterator[Change]:
    ordinal = iter(range(10_000))
    for account in range(1, ACCOUNTS + 1):
        yield _change("account", "r", SNAPSHOT_LSN, next(ordinal), id=account, balance=OPENING_BALANCE)
    for key in range(1, COUNTERS + 1):
        yield _change("counter", "r", SNAPSHOT_LSN, next(ordinal), key=key, n=0)


def _stream() -> Iterator[Change]:
    book = {"uid": 5, "writer": 0, "price": Decimal("1.50"), "body": "long", "note": None}
    yield _change("account", "u", 0x200, 0, id=1, balance=OPENING_BALANCE - 7)
    yield _change("account", "u", 0x200, 1, id=2, balance=OPENING_BALANCE + 7)
    yield _change("counter", "u", 0x200, 2, key=3, n=1)
    yield _change("marker", "c", 0x200, 3, writer=0, seq=0, changes=4)
    yield _change("item", "c", 0x300, 0, id=50, **book)
    yield _change("counter", "u", 0x300, 1, key=3, n=2)
    yield _change("marker", "c", 0x300, 2, writer=0, seq=1, changes=3)
    # the key changes, and the TOASTed body was not sent
    yield _change("item", "u", 0x400, 0, id=-50, **{k: v for k, v in book.items() if k != "body"})
    yield _change("scratch", "t", 0x400, 1)
    yield _change("marker", "c", 0x400, 2, writer=0, seq=2, changes=3)
    yield _change("counter", "u", 0x500, 0, key=3, n=3)
    yield _change("marker", "c", 0x500, 1, writer=0, seq=3, changes=2)


def _by_table(changes: list[Change]) -> list[Change]:
    return sorted(changes, key=lambda change: (change.table, change.log_offset))


@pytest.fixture
def good() -> list[Change]:
    return _by_table([*_snapshot(), *_stream()])


@pytest.fixture
def source() -> State:
    balances = {1: OPENING_BALANCE - 7, 2: OPENING_BALANCE + 7}
    body = {"uid": 5, "writer": 0, "price": Decimal("1.50"), "body": "long", "note": None}
    markers = {(0, n): {"writer": 0, "seq": n, "changes": c} for n, c in enumerate((4, 3, 3, 2))}
    return {
        **{table: {} for table in TABLES},
        "account": {
            (a,): {"id": a, "balance": balances.get(a, OPENING_BALANCE)} for a in range(1, ACCOUNTS + 1)
        },
        "counter": {(k,): {"key": k, "n": 3 if k == 3 else 0} for k in range(1, COUNTERS + 1)},
        "item": {(-50,): {"id": -50, **body}},
        "marker": markers,
    }


def test_a_good_history_has_no_problems(good: list[Change], source: State) -> None:
    assert history_problems(good, source) == []


def _lost_row(changes: list[Change]) -> list[Change]:
    return [c for c in changes if (c.commit_lsn, c.ordinal) != (0x300, 1)]


def _lost_transaction(changes: list[Change]) -> list[Change]:
    return [c for c in changes if c.commit_lsn != 0x400]


def _lost_last_transaction(changes: list[Change]) -> list[Change]:
    return [c for c in changes if c.commit_lsn != 0x500]


def _lost_snapshot_row(changes: list[Change]) -> list[Change]:
    return [c for c in changes if (c.commit_lsn, c.ordinal) != (SNAPSHOT_LSN, ACCOUNTS + 20)]


def _doubled_row(changes: list[Change]) -> list[Change]:
    return changes + [replace(c, file="again") for c in changes if c.commit_lsn == 0x200]


def _transaction_captured_twice(changes: list[Change]) -> list[Change]:
    # The same commit at two places of the log: as the log offset differs, this is no simple repeat.
    again = [replace(c, log_offset=c.log_offset + 10**7) for c in changes if c.commit_lsn == 0x500]
    return _by_table(changes + again)


def _transaction_captured_twice_under_another_position(changes: list[Change]) -> list[Change]:
    again = [
        replace(c, log_offset=c.log_offset + 10**7, commit_lsn=0x600)
        for c in changes
        if c.commit_lsn == 0x500
    ]
    return _by_table(changes + again)


def _swapped_rows(changes: list[Change]) -> list[Change]:
    offset = {(0x300, 1): 1_000 * 0x500, (0x500, 0): 1_000 * 0x300 + 10}
    return _by_table(
        [replace(c, log_offset=offset.get((c.commit_lsn, c.ordinal), c.log_offset)) for c in changes]
    )


def _swapped_in_the_file(changes: list[Change]) -> list[Change]:
    return [changes[1], changes[0], *changes[2:]]


def _torn_transaction(changes: list[Change]) -> list[Change]:
    return [c for c in changes if (c.commit_lsn, c.table) != (0x200, "account")]


def _torn_at_its_end(changes: list[Change]) -> list[Change]:
    return [c for c in changes if (c.commit_lsn, c.table) != (0x500, "marker")]


def _wrong_value(changes: list[Change]) -> list[Change]:
    return [replace(c, values={**c.values, "price": Decimal(2)}) if c.op == "c" and c.table == "item" else c
            for c in changes]  # fmt: skip


def _toast_read_as_null(changes: list[Change]) -> list[Change]:
    return [replace(c, values={**c.values, "body": None}) if c.op == "u" and c.table == "item" else c
            for c in changes]  # fmt: skip


SPOILED: dict[str, Callable[[list[Change]], list[Change]]] = {
    function.__name__.strip("_"): function
    for function in (
        _lost_row, _lost_transaction, _lost_last_transaction, _lost_snapshot_row, _doubled_row,
        _transaction_captured_twice, _transaction_captured_twice_under_another_position, _swapped_rows,
        _swapped_in_the_file, _torn_transaction, _torn_at_its_end,
        _toast_read_as_null,
    )
}  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
def test_a_spoiled_history_is_caught(
    spoil: Callable[[list[Change]], list[Change]], good: list[Change], source: State
) -> None:
    assert history_problems(spoil(good), source)


def test_a_wrong_value_is_caught_unless_it_is_overwritten(good: list[Change], source: State) -> None:
    # A later update of the row sends the price again, so the last value is right: the history alone can't
    # show the wrong value between. A wrong last value is always found.
    assert history_problems(_wrong_value(good), source) == []
    source["item"][(-50,)]["price"] = Decimal(3)
    assert history_problems(good, source) == ["item: row (-50,) differs in ['price']"]


def _write_parquet(path: Path, changes: list[Change]) -> None:
    for table, rows in _arrow_tables(changes).items():
        (path / f"public.{table}").mkdir(parents=True)
        pq.write_table(rows, path / f"public.{table}" / "000.parquet")
        (path / f"public.{table}" / ".000.tmp.parquet").write_bytes(b"half a file")


def _write_delta(path: Path, changes: list[Change]) -> None:
    for table, rows in _arrow_tables(changes).items():
        write_deltalake(str(path / f"public.{table}"), rows)


def _write_json(path: Path, changes: list[Change]) -> None:
    for change in changes:
        row: dict[str, Any] = dict(change.values)
        if change.table == "item" and change.op == "u":
            row["body"] = "__debezium_unavailable_value"
        record = {
            "before": None, "after": row or None, "op": change.op, "source": {"table": change.table},
            "position": {"task": "0", "log_offset": change.log_offset,
                         "commit_lsn": change.commit_lsn, "ordinal": change.ordinal},
        }  # fmt: skip
        folder = path / f"public.{change.table}"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "000.jsonl").open("a") as file:
            file.write(json.dumps(record, default=str) + "\n")


def _arrow_tables(changes: list[Change]) -> dict[str, pa.Table]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for change in changes:
        row = {column: change.values.get(column) for column in TABLES[change.table]}
        not_sent = [c for c in TABLES[change.table] if c not in change.values] if change.op == "u" else []
        row |= {"_op": change.op, "_commit_lsn": change.commit_lsn, "_ordinal": change.ordinal}
        row |= {"_log_offset": change.log_offset, "_unchanged": not_sent}
        rows.setdefault(change.table, []).append(row)
    text = pa.schema([("_unchanged", pa.list_(pa.string()))])
    tables = {}
    for table, content in rows.items():
        guessed = pa.Table.from_pylist(content)
        types = [
            text.field(0) if f.name == "_unchanged" else pa.field(f.name, pa.string())
            if pa.types.is_null(f.type) else f
            for f in guessed.schema
        ]  # fmt: skip
        tables[table] = pa.Table.from_pylist(content, schema=pa.schema(types))
    return tables


@pytest.mark.parametrize(
    ("kind", "write"), [("parquet", _write_parquet), ("delta", _write_delta), ("jsonl", _write_json)]
)
def test_each_form_of_a_history_is_read_as_it_was_written(
    kind: str,
    write: Callable[[Path, list[Change]], None],
    good: list[Change],
    source: State,
    tmp_path: Path,
) -> None:
    write(tmp_path, good)
    assert history_problems(read_history(kind, tmp_path), source) == []
    assert history_problems(read_history(kind, tmp_path)[1:], source)


def _write_mirror(path: Path, source: State) -> None:
    for table, rows in source.items():
        if rows:
            rows_now = pa.Table.from_pylist(list(rows.values()))
            write_deltalake(str(path / f"public.{table}"), rows_now, mode="overwrite")


@pytest.fixture
def plain_source(source: State) -> State:
    source["item"][(-50,)]["note"] = "none"  # a column of NULLs alone has no Delta type
    return source


def test_a_mirror_equal_to_the_source_has_no_problems(plain_source: State, tmp_path: Path) -> None:
    _write_mirror(tmp_path, plain_source)
    assert mirror_problems(tmp_path, plain_source) == []


def test_a_mirror_with_a_wrong_lost_or_extra_row_is_caught(plain_source: State, tmp_path: Path) -> None:
    _write_mirror(tmp_path, plain_source)
    plain_source["item"][(-50,)]["body"] = "other"
    plain_source["marker"][(0, 4)] = {"writer": 0, "seq": 4, "changes": 1}
    del plain_source["counter"][(25,)]
    assert mirror_problems(tmp_path, plain_source) == [
        "counter: row (25,) is too many",
        "item: row (-50,) differs in ['body']",
        "marker: row (0, 4) is missing",
    ]


def test_a_mirror_with_half_a_transaction_in_an_older_version_is_caught(
    plain_source: State, tmp_path: Path
) -> None:
    whole = list(plain_source["account"].values())
    torn = [{**row, "balance": OPENING_BALANCE + 7} if row["id"] == 1 else row for row in whole]
    write_deltalake(str(tmp_path / "public.account"), pa.Table.from_pylist(torn))
    write_deltalake(str(tmp_path / "public.account"), pa.Table.from_pylist(whole), mode="overwrite")
    counters = list(plain_source["counter"].values())
    ahead = [{**row, "n": row["n"] + 1} for row in counters]
    write_deltalake(str(tmp_path / "public.counter"), pa.Table.from_pylist(ahead))
    write_deltalake(str(tmp_path / "public.counter"), pa.Table.from_pylist(counters), mode="overwrite")
    wanted = {table: plain_source[table] if table in ("account", "counter") else {} for table in TABLES}
    found = mirror_problems(tmp_path, wanted)
    assert found[0] == f"the ledger's sum is {LEDGER_SUM + 14} in version 0 of the mirror, not {LEDGER_SUM}"
    assert "counter (1,) goes back to 0 in version 1 of the mirror" in found


def test_a_mirror_may_lack_accounts_only_until_a_snapshot_is_complete(
    plain_source: State, tmp_path: Path
) -> None:
    whole = list(plain_source["account"].values())
    for rows in (whole[:20], whole, whole[:-1]):
        write_deltalake(str(tmp_path / "public.account"), pa.Table.from_pylist(rows), mode="overwrite")
    _write_mirror(tmp_path, plain_source)
    [found] = mirror_problems(tmp_path, plain_source)
    assert "in version 2 of the mirror" in found


def test_a_mirror_with_one_key_twice_is_refused(plain_source: State, tmp_path: Path) -> None:
    rows = list(plain_source["counter"].values())
    write_deltalake(str(tmp_path / "public.counter"), pa.Table.from_pylist([*rows, rows[0]]))
    with pytest.raises(AssertionError, match="stands there twice"):
        read_mirror(tmp_path / "public.counter")
