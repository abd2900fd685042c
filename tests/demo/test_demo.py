"""The demo: its books balance, its proof can fail, and it never empties a foreign directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from tailrace.errors import Kind, TailraceError
from tailrace_demo import proof
from tailrace_demo.places import own_directory
from tailrace_demo.shop import LEDGER_SUM, TABLES, Shop, source_rows
from tests.support.postgres import Database
from tests.support.wait import wait_until


def _worked_in(database: Database, transactions: int) -> Shop:
    shop = Shop(database.connect, writers=2, pause_s=0)
    shop.open()
    with shop:
        wait_until(lambda: shop.transactions >= transactions, 60)
    return shop


def test_the_shop_moves_money_but_keeps_the_sum(pg: Database) -> None:
    shop = _worked_in(pg, 200)
    assert pg.query("select sum(balance) from account") == [(LEDGER_SUM,)]
    assert pg.query("select count(*) > 0 from orders where state = 'shipped'") == [(True,)]
    # every payment moves two accounts
    moved, transfers = pg.query("select sum(version), (select count(*) from transfer) from account")[0]
    assert moved == 2 * transfers
    before = shop.transactions
    assert shop.last_sale() > 0
    assert shop.transactions == before + 1


def _lake(database: Database, path: Path) -> tuple[Path, Path]:
    """Write the lake of a correct pipeline, with everything from the snapshot."""
    with database.connect() as connection:
        for table, columns in TABLES.items():
            rows = [dict(zip(columns, row, strict=True)) for row in source_rows(connection, table)]
            content = pa.Table.from_pylist(rows)
            write_deltalake(str(path / "current" / f"public.{table}"), content)
            offsets = pa.array(range(len(rows)), pa.int64())
            offsets = pa.compute.add(offsets, 1_000_000 * list(TABLES).index(table))
            write_deltalake(
                str(path / "history" / f"public.{table}"), content.append_column("_log_offset", offsets)
            )
    return path / "current", path / "history"


def _broken(database: Database, mirrors: Path, history: Path) -> list[str]:
    with database.connect() as connection:
        return [f.claim for f in proof.findings(mirrors, history, connection) if not f.holds]


def test_the_proof_holds_for_a_right_lake_and_fails_for_a_wrong_one(pg: Database, tmp_path: Path) -> None:
    _worked_in(pg, 50)
    mirrors, history = _lake(pg, tmp_path)
    assert _broken(pg, mirrors, history) == []
    # a transfer arrives twice
    transfers = DeltaTable(str(history / "public.transfer")).to_pyarrow_table()
    write_deltalake(str(history / "public.transfer"), transfers.slice(0, 1), mode="append")
    assert _broken(pg, mirrors, history) == ["no change arrived twice", "every transfer arrived, and once"]
    # half a payment becomes visible in the mirror, and the history lacks it
    pg.execute("update account set balance = balance - 1, version = version + 1 where id = 1")
    assert "no account misses a movement" in _broken(pg, mirrors, history)
    assert "mirror of account equals the source" in _broken(pg, mirrors, history)
    DeltaTable(str(mirrors / "public.account")).update({"balance": "balance - 1"}, predicate="id = 1")
    assert "no version of the mirror ever showed half a transfer" in _broken(pg, mirrors, history)


def test_a_foreign_directory_is_refused_and_not_changed(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(TailraceError) as refused, own_directory(tmp_path):
        pass
    assert refused.value.kind is Kind.ENVIRONMENT_UNFIT
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_earlier_demos_directory_is_emptied_and_a_running_ones_refused(tmp_path: Path) -> None:
    with own_directory(tmp_path / "demo") as places:
        places.file.write_text("old")
        places.mirror.mkdir(parents=True)
        with pytest.raises(TailraceError, match="another demo runs"), own_directory(tmp_path / "demo"):
            pass
        assert places.file.exists()
    with own_directory(tmp_path / "demo") as places:
        assert not places.file.exists()
        assert not places.mirror.exists()


@pytest.mark.ci
def test_the_whole_demo_proves_its_claims_and_prints_plain_lines_without_a_terminal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tailrace", "demo", "--dir", str(tmp_path / "demo"), "--seconds", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Proven" in done.stdout
    assert "\x1b" not in done.stdout
    password = (tmp_path / "demo" / "password").read_text()
    assert password not in done.stdout + done.stderr
    assert os.stat(tmp_path / "demo" / "password").st_mode & 0o077 == 0
