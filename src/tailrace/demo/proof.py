"""What the demo claims in the end, found out from the lake and the source alone.

The lake is read by delta-rs, which shares no code with what wrote it.
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

from tailrace.demo.shop import LEDGER_SUM, OPENING_ROWS, TABLES, source_rows


@dataclass(frozen=True, slots=True)
class Finding:
    """One claim, what was found, and whether that bears the claim out."""

    claim: str
    found: str
    holds: bool


def findings(mirrors: Path, history: Path, shop: psycopg.Connection[Any], changes: int) -> Iterator[Finding]:
    """Yield each claim with its proof.

    :param mirrors: folder of the mirror tables.
    :param history: folder of the tables that hold every change.
    :param shop: a connection to the source, at rest.
    :param changes: how many changes the shop's writers committed.
    """
    for table in TABLES:
        yield _mirror_equals_source(mirrors / f"public.{table}", table, source_rows(shop, table))
    yield _ledger_balanced_throughout(mirrors / "public.account")
    events = {table: DeltaTable(str(history / f"public.{table}")).to_pyarrow_table() for table in TABLES}
    yield _each_change_once(events, changes + OPENING_ROWS)
    yield _no_gap_in_any_account(events["account"])


def _mirror_equals_source(path: Path, table: str, wanted: list[tuple[Any, ...]]) -> Finding:
    content = DeltaTable(str(path)).to_pyarrow_table(columns=list(TABLES[table])).sort_by(TABLES[table][0])
    rows = list(zip(*(column.to_pylist() for column in content.columns), strict=True))
    same = rows == wanted
    found = f"{len(rows):,} rows, the same" if same else f"{len(rows):,} rows, the source has {len(wanted):,}"
    return Finding(f"mirror of {table} equals the source", found, same)


def _ledger_balanced_throughout(path: Path) -> Finding:
    newest = DeltaTable(str(path)).version()
    sums = {
        pc.sum(balances).as_py()
        for version in range(newest + 1)
        if len(balances := DeltaTable(str(path), version=version).to_pyarrow_table(columns=["balance"])[0])
    }
    found = f"{', '.join(f'{total:,}' for total in sorted(sums))} in each of {newest + 1} versions"
    return Finding("no version of the mirror ever showed half a transfer", found, sums == {LEDGER_SUM})


def _each_change_once(events: dict[str, pa.Table], wanted: int) -> Finding:
    offsets = pa.chunked_array([chunk for table in events.values() for chunk in table["_log_offset"].chunks])
    distinct = pc.count_distinct(offsets).as_py()
    found = f"{wanted:,} committed, {len(offsets):,} arrived, {distinct:,} of them distinct"
    return Finding("every change arrived once", found, wanted == len(offsets) == distinct)


def _no_gap_in_any_account(account: pa.Table) -> Finding:
    # An account's n-th movement has version n: n versions from 0 to n-1, none twice, leave no gap.
    versions = account.group_by("id").aggregate(
        [("version", "count"), ("version", "count_distinct"), ("version", "max")]
    )
    count, distinct, highest = (versions[f"version_{name}"] for name in ("count", "count_distinct", "max"))
    whole = pc.and_(pc.equal(count, distinct), pc.equal(pc.add(highest, 1), count))
    movements = pc.sum(highest).as_py()
    good = pc.sum(whole).as_py()
    found = f"{good} of {len(versions)} accounts whole, {movements:,} movements"
    return Finding("each account's movements are there without gap or repeat", found, good == len(versions))
