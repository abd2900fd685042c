"""Checks a sink against the source alone: nothing lost, repeated, incomplete or out of order.

The checks know the workload (`ledger`) and nothing of the product. Each returns problems as
sentences, a few of each kind; an empty list means that all is well.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any

from tests.support.torture.ledger import ACCOUNTS, LEDGER_SUM, TABLES, source_rows
from tests.support.torture.sinks import Change, mirror_versions, read_history, read_mirror

Rows = dict[tuple[Any, ...], dict[str, Any]]
State = dict[str, Rows]

_EXAMPLES = 3


def problems(kind: str, path: Path, dsn: str) -> list[str]:
    """Return the problems of the sink of `kind` at `path`, with the source at rest.

    :param kind: `parquet`, `jsonl`, `delta` (append) or `mirror`.
    """
    source = source_rows(dsn)
    if kind == "mirror":
        return mirror_problems(path, source)
    return history_problems(read_history(kind, path), source)


def history_problems(changes: list[Change], source: State) -> list[str]:
    """Return the problems of a history of changes, given the source's rows at its end."""
    found = [*_doubled(changes), *_swapped_in_files(changes)]
    ordered = sorted(changes, key=lambda change: change.log_offset)
    found += _swapped(ordered)
    state: State = {table: {} for table in TABLES}
    # Until an interrupted snapshot is complete, rows that it has not read yet may be changed; they are read
    # later as they are then. Changes of a table before its first chunk are left out.
    read_until = {change.table: change.log_offset for change in ordered if change.op == "r"}
    first_read = {change.table: change.log_offset for change in reversed(ordered) if change.op == "r"}
    # The place of a chunk without rows is unknown.
    begun = first_read if {change.table for change in ordered} <= first_read.keys() else read_until
    all_begun = max(begun.values(), default=0)
    for commit_lsn, group in groupby(ordered, key=lambda change: change.commit_lsn):
        transaction = list(group)
        found += _torn(transaction, commit_lsn, all_begun)
        found += _replay(transaction, state, read_until)
        if state["account"] and transaction[-1].log_offset >= read_until.get("account", 0):
            found += _ledger(state["account"], f"after the transaction at {commit_lsn:X}")
    found += _gaps(state["marker"])
    found += _different(state, source)
    return found


def mirror_problems(path: Path, source: State) -> list[str]:
    """Return the problems of Delta mirrors: each version's sums and counters, and the last rows."""
    found: list[str] = []
    counters: dict[tuple[Any, ...], int] = {}
    is_whole = False  # an interrupted snapshot is continued chunk by chunk: accounts are missing until then
    for version in mirror_versions(path / "public.account"):
        accounts = read_mirror(path / "public.account", version)
        is_whole = is_whole or len(accounts) == ACCOUNTS
        if is_whole:
            found += _ledger(accounts, f"in version {version} of the mirror")
    for version in mirror_versions(path / "public.counter"):
        for key, row in read_mirror(path / "public.counter", version).items():
            if row["n"] < counters.get(key, 0):
                found.append(f"counter {key} goes back to {row['n']} in version {version} of the mirror")
            counters[key] = row["n"]
    state = {
        table: read_mirror(folder) if (folder := path / f"public.{table}").is_dir() else {}
        for table in TABLES
    }
    return found + _different(state, source)


def _doubled(changes: list[Change]) -> list[str]:
    offsets = Counter(change.log_offset for change in changes)
    places = Counter((change.commit_lsn, change.ordinal) for change in changes)
    found = [f"log offset {offset} stands there {n} times" for offset, n in offsets.items() if n > 1]
    found += [f"change {place} stands there {n} times" for place, n in places.items() if n > 1]
    return found[:_EXAMPLES]


def _swapped_in_files(changes: list[Change]) -> list[str]:
    found = []
    for file, rows in groupby(changes, key=lambda change: change.file):
        offsets = [change.log_offset for change in rows]
        if offsets != sorted(offsets):
            found.append(f"rows of {file} are not in the order of the log")
    return found[:_EXAMPLES]


def _swapped(ordered: list[Change]) -> list[str]:
    found = []
    for before, after in pairwise(ordered):
        if (after.commit_lsn, after.ordinal) <= (before.commit_lsn, before.ordinal):
            found.append(
                f"change ({after.commit_lsn:X}, {after.ordinal}) lies behind"
                f" ({before.commit_lsn:X}, {before.ordinal}) in the log"
            )
    return found[:_EXAMPLES]


def _torn(transaction: list[Change], commit_lsn: int, all_begun: int) -> list[str]:
    ordinals = [change.ordinal for change in transaction]
    if sorted(ordinals) != list(range(len(ordinals))):
        return [f"transaction at {commit_lsn:X}: its changes are not numbered 0 to {len(ordinals) - 1}"]
    if all(change.op == "r" for change in transaction):
        return []
    left_out = transaction[0].log_offset < all_begun
    markers = [change for change in transaction if change.table == "marker"]
    if left_out and not markers:
        return []
    if len(markers) != 1:
        return [f"transaction at {commit_lsn:X}: {len(markers)} marker rows in {len(ordinals)} changes"]
    wanted = markers[0].values["changes"]
    if len(transaction) > wanted or (len(transaction) < wanted and not left_out):
        return [f"transaction at {commit_lsn:X}: {len(transaction)} changes of {wanted}"]
    return []


def _replay(transaction: list[Change], state: State, read_until: dict[str, int]) -> list[str]:
    # Every change is applied, whatever the checks of the ones before it found.
    return [
        f"{change.table} at ({change.commit_lsn:X}, {change.ordinal}): {problem}"
        for change in transaction
        if (problem := _apply(change, state[change.table], read_until.get(change.table, 0)))
    ][:_EXAMPLES]


def _apply(change: Change, rows: Rows, read_until: int) -> str | None:
    """Apply one change to `rows`; return what is impossible about it.

    :param read_until: the log offset of the table's last snapshot row.
    """
    in_snapshot = change.log_offset < read_until
    match change.op:
        case "t":
            rows.clear()
        case "c" if change.key in rows:
            return f"a row {change.key} comes into being that is there already"
        case "r" if change.key in rows:
            return _read_again(change, rows)
        case "r" | "c":
            rows[change.key] = dict(change.values)
        case "d":
            if rows.pop(change.key, None) is None and not in_snapshot:
                return f"a row {change.key} is deleted that is not there"
        case "u":
            return _update(change, rows, in_snapshot=in_snapshot)
        case _:
            return f"unknown operation {change.op!r}"
    return None


def _read_again(change: Change, rows: Rows) -> str | None:
    """A row that is read late is as it was then, or what was known of it."""
    known, rows[change.key] = rows[change.key], dict(change.values)
    differing = [name for name, value in known.items() if change.values.get(name, ...) != value]
    return (
        f"a row {change.key} is read that differs in {differing} from what was known" if differing else None
    )


def _update(change: Change, rows: Rows, *, in_snapshot: bool) -> str | None:
    old_key = change.key
    if change.key not in rows and "uid" in change.values:
        # The workload changes a key only by its sign; `uid` shows that it is the same row.
        moved = (-change.key[0],)
        if moved in rows and rows[moved]["uid"] == change.values["uid"]:
            old_key = moved
    old = rows.pop(old_key, None)
    if old is None:
        rows[change.key] = dict(change.values)
        return None if in_snapshot else f"a row {change.key} is updated that is not there"
    rows[change.key] = new = {**old, **change.values}
    if change.table == "counter" and new["n"] != old["n"] + 1:
        return f"counter {change.key} goes from {old['n']} to {new['n']}"
    return None


def _ledger(accounts: Rows, when: str) -> list[str]:
    total = sum(row["balance"] for row in accounts.values())
    return [] if total == LEDGER_SUM else [f"the ledger's sum is {total} {when}, not {LEDGER_SUM}"]


def _gaps(markers: Rows) -> list[str]:
    numbers: dict[int, list[int]] = defaultdict(list)
    for writer, sequence in markers:
        numbers[writer].append(sequence)
    return [
        f"writer {writer}: {len(found)} transactions, but the last one is number {max(found)}"
        for writer, found in numbers.items()
        if sorted(found) != list(range(len(found)))
    ]


def _different(state: State, source: State) -> list[str]:
    found: list[str] = []
    for table, wanted in source.items():
        rows = state[table]
        found += _examples(f"{table}: row {key} is missing" for key in wanted.keys() - rows.keys())
        found += _examples(f"{table}: row {key} is too many" for key in rows.keys() - wanted.keys())
        found += _examples(
            f"{table}: row {key} differs in {_columns(rows[key], wanted[key])}"
            for key in wanted.keys() & rows.keys()
            if rows[key] != wanted[key]
        )
    return found


def _columns(row: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    return [column for column in wanted if row.get(column, ...) != wanted[column]]


def _examples(sentences: Iterable[str]) -> list[str]:
    return list(islice(sentences, _EXAMPLES))
