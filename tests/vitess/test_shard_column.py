"""The column with the shard that a row's newest change came from."""

from __future__ import annotations

import pytest

from tailrace.errors import Kind, TailraceError
from tailrace.protocol.metadata_frames import kept_frames
from tailrace.sources.vitess.rows.tables import LogTables
from tailrace.sources.vitess.rows.transcoder import Transcoder
from tests.support.vitess import messages as ms
from tests.support.vitess.reading import read

COLUMNS = [ms.ID, ms.WHAT]
OTHER = "80-"


def _default_of(shard: str, table: str, column: str) -> tuple[str | None, ...] | None:
    """Return the facts of the table once it was altered."""
    return (None, "") if column in {"id", "more"} else None


def _tables(in_force: dict[str, bytes] | None = None, column: str = "_shard") -> LogTables:
    return LogTables(in_force or {}, _default_of, column)


def test_each_row_has_its_shard_whether_read_inserted_or_updated() -> None:
    tables = _tables()
    one, other = (Transcoder(ms.KEYSPACE, shard, tables) for shard in (ms.SHARD, OTHER))
    read_rows = ms.copied(ms.described("t", COLUMNS), ms.rows("t", [ms.change(after=[b"1", b"a"])], time_s=0))
    made = one.transcode([read_rows], 1)
    changes = [
        ms.change(after=[b"2", b"b"]),
        ms.change(before=[b"2", b"b"], after=[b"2", b"c"]),
        ms.change(before=[b"2", b"c"]),
    ]
    events = ms.described("t", COLUMNS, OTHER), ms.rows("t", changes, OTHER)
    written = ms.transaction(*events, gtid="MySQL56/b:1-5", shard=OTHER)
    theirs = other.transcode([written], made.position)
    in_force: dict[str, bytes] = {}
    found = [*read(made.frames, in_force), *read(theirs.frames, in_force, made.position)]
    assert [(change.op, change.row["id"], change.row["_shard"]) for change in found] == [
        ("r", "1", ms.SHARD),
        ("c", "2", OTHER),
        ("u", "2", OTHER),
        ("d", "2", None),  # a deleted row has only its key
    ]


def test_the_column_stays_over_a_restart_and_a_change_of_the_table() -> None:
    in_force: dict[str, bytes] = {}
    made = Transcoder(ms.KEYSPACE, ms.SHARD, _tables()).transcode(
        [ms.transaction(ms.described("t", COLUMNS), ms.rows("t", [ms.change(after=[b"1", b"a"])]))], 1
    )
    read(made.frames, in_force)
    tables = _tables(in_force)
    tables.keep_shards([ms.SHARD])
    more = ("more", ms.BIGINT, "bigint", 0, ms.BINARY)
    altered = ms.transaction(
        ms.described("t", [ms.ID, more]), ms.rows("t", [ms.change(after=[b"2", b"7"])]), gtid="MySQL56/a:1-6"
    )
    again = Transcoder(ms.KEYSPACE, ms.SHARD, tables).transcode([altered], made.position)
    (change,) = read(again.frames, dict(in_force), made.position)
    assert change.row == {"id": "2", "more": "7", "_shard": ms.SHARD}
    in_force.update(kept_frames(again.frames))
    # Without the setting it disappears, as does a column that no shard has.
    plain = LogTables(in_force, _default_of)
    plain.keep_shards([ms.SHARD])
    last = Transcoder(ms.KEYSPACE, ms.SHARD, plain).transcode([altered], again.position)
    (change,) = read(last.frames, dict(in_force), again.position)
    assert change.row == {"id": "2", "more": "7"}


def test_a_table_that_has_a_column_of_that_name_is_refused() -> None:
    with pytest.raises(TailraceError, match=r"shop\.t: it has a column 'what' itself") as refused:
        Transcoder(ms.KEYSPACE, ms.SHARD, _tables(column="what")).transcode(
            [ms.transaction(ms.described("t", COLUMNS), ms.rows("t", [ms.change(after=[b"1", b"a"])]))], 1
        )
    assert refused.value.kind is Kind.CONFIG_INVALID
