"""Checks the demo's claims, by reading only the lake and the source.

The lake is read with delta-rs, which shares no code with the writer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from tailrace_demo.shop import LEDGER_SUM, TABLES, source_rows


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim, what was found, and whether the claim is true."""

    claim: str
    found: str
    holds: bool


def findings(mirrors: Path, history: Path, shop: psycopg.Connection[Any]) -> Iterator[Claim]:
    """Yield each claim with the result of its check.

    :param mirrors: folder of the mirror tables.
    :param history: folder of the tables with every change.
    :param shop: a connection to the source, which nothing writes to any more.
    """
    source = {table: source_rows(shop, table) for table in TABLES}
    for table, rows in source.items():
        yield _mirror_equals_source(mirrors / f"public.{table}", table, rows)
    yield _ledger_balanced_throughout(mirrors / "public.account")
    events = {table: DeltaTable(str(history / f"public.{table}")).to_pyarrow_table() for table in TABLES}
    yield _nothing_twice(events)
    yield _each_transfer_once(events["transfer"], len(source["transfer"]))
    yield _no_movement_missing(events["account"], {row[0]: row[3] for row in source["account"]})


def _mirror_equals_source(path: Path, table: str, wanted: list[tuple[Any, ...]]) -> Claim:
    content = DeltaTable(str(path)).to_pyarrow_table(columns=list(TABLES[table])).sort_by(TABLES[table][0])
    rows = list(zip(*(column.to_pylist() for column in content.columns), strict=True))
    same = rows == wanted
    found = f"{len(rows):,} rows, the same" if same else f"{len(rows):,} rows, the source has {len(wanted):,}"
    return Claim(f"mirror of {table} equals the source", found, same)


def _ledger_balanced_throughout(path: Path) -> Claim:
    newest = DeltaTable(str(path)).version()
    sums = {
        pc.sum(balances).as_py()
        for version in range(newest + 1)
        if len(balances := DeltaTable(str(path), version=version).to_pyarrow_table(columns=["balance"])[0])
    }
    found = f"{', '.join(f'{total:,}' for total in sorted(sums))} in each of {newest + 1} versions"
    return Claim("no version of the mirror ever showed half a transfer", found, sums == {LEDGER_SUM})


def _nothing_twice(events: dict[str, pa.Table]) -> Claim:
    offsets = pa.chunked_array([chunk for table in events.values() for chunk in table["_log_offset"].chunks])
    distinct = pc.count_distinct(offsets).as_py()
    found = f"{len(offsets):,} changes in the history, {distinct:,} different ones"
    return Claim("no change arrived twice", found, distinct == len(offsets))


def _each_transfer_once(transfer: pa.Table, wanted: int) -> Claim:
    # From the snapshot or from the stream: at the point where the stream continues the snapshot, an
    # error would lose a row or deliver it twice.
    distinct = pc.count_distinct(transfer["id"]).as_py()
    found = f"{wanted:,} in the shop, {len(transfer):,} in the history"
    return Claim("every transfer arrived, and once", found, wanted == len(transfer) == distinct)


def _no_movement_missing(account: pa.Table, newest: dict[int, int]) -> Claim:
    # Each movement increases the account's version by one. So the history must have every version
    # from the snapshot's to the current one, each exactly once.
    versions = account.group_by("id").aggregate(
        [("version", name) for name in ("count", "count_distinct", "min", "max")]
    )
    whole = sum(
        row["version_count"] == row["version_count_distinct"] == row["version_max"] - row["version_min"] + 1
        and row["version_max"] == newest[row["id"]]
        for row in versions.to_pylist()
    )
    movements = len(account) - len(newest)
    found = f"{whole} of {len(newest)} accounts whole, {movements:,} movements"
    return Claim("no account misses a movement", found, whole == len(newest))
