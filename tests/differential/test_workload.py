"""The workload itself keeps its promises to tests."""

from __future__ import annotations

import pytest

from tests.support.differential.kinds import KEY_PARTS
from tests.support.differential.statements import Cursor
from tests.support.differential.tables import SERIAL, Column, Table
from tests.support.differential.workload import Workload
from tests.support.postgres import Database


@pytest.mark.parametrize("deferrable", [False, True])
def test_a_table_whose_keys_are_all_taken_gets_a_new_row_nevertheless(pg: Database, deferrable: bool) -> None:
    work = Workload(pg.dsn, 7, "none")
    try:
        columns = (Column("uid", SERIAL, required=True), Column("k0", KEY_PARTS[0], required=True))
        wanted = Table(0, "public", "full", columns, ("k0",), "f", deferrable)
        table = work.create(Cursor(work._sessions[0].connection), wanted)
        pg.execute('insert into "full" select n, n from generate_series(0, 3) n')  # every possible key
        work.tables = {table.oid: table}
        work.touch()
        (changes,) = work.committed
        assert changes > 1  # a key was freed
    finally:
        work.close()
