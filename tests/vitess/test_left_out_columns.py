"""Columns that the settings exclude: their values do not go into the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailrace.config.source.vitess import VitessSource
from tailrace.decode.changes import decode_block
from tailrace.protocol.facts import Facts
from tailrace.protocol.frames import control_json
from tailrace.protocol.metadata_frames import kept_frames
from tailrace.sources.vitess.rows.tables import LogTables
from tailrace.sources.vitess.rows.transcoder import Transcoded, Transcoder
from tests.support.vitess import messages as ms
from tests.support.vitess.capturing import capturing
from tests.support.vitess.fake_vtgate import FakeVtgate
from tests.support.vitess.reading import read

SECRET: ms.ColumnGiven = ("secret", ms.VARCHAR, "varchar(64)", 0, ms.UTF8MB4)
PAPER: ms.ColumnGiven = ("paper", ms.JSON, "json", 0, ms.BINARY)
OTHER_PAPER: ms.ColumnGiven = ("other", ms.JSON, "json", 0, ms.BINARY)
#: Of a type that is not known.
STRANGE: ms.ColumnGiven = ("strange", ms.VARCHAR, "hologram", 0, ms.UTF8MB4)


class Log:
    """The frames that transcoders wrote for a shard, one after the other, each with its settings."""

    def __init__(self) -> None:
        self.in_force: dict[str, bytes] = {}
        self.data = b""
        self._position = 1

    def take(self, *responses: bytes, **settings: Any) -> Transcoded:
        source = VitessSource.model_validate({"hosts": ["h:1"], "keyspace": ms.KEYSPACE, **settings})
        tables = LogTables(self.in_force, lambda *_: (None, ""))
        tables.keep_shards([ms.SHARD])
        transcoder = Transcoder(ms.KEYSPACE, ms.SHARD, tables, left_out=source.disclosure.left_out)
        made = transcoder.transcode(list(responses), self._position)
        self._position = made.position
        self.data += made.frames.tobytes()
        return made

    def rows(self, made: Transcoded) -> list[tuple[str, dict[str, str | None]]]:
        return [(change.op, change.row) for change in read(made.frames, self.in_force, made.position - 1)]

    def facts(self) -> Facts:
        return Facts.from_json(control_json(self.in_force["F1"]))


def _written(*columns: ms.ColumnGiven, values: list[bytes | None], gtid: str = "MySQL56/a:1-5") -> bytes:
    return ms.transaction(ms.described("t", columns), ms.rows("t", [ms.change(after=values)]), gtid=gtid)


@pytest.mark.parametrize(
    "settings",
    [{"columns_exclude": ["*.*.secret"]}, {"columns": ["shop.t.what"]}, {"columns_exclude": ["/.*secret/"]}],
)
def test_values_of_an_excluded_column_are_not_in_the_log(settings: dict[str, Any]) -> None:
    log = Log()
    changes = [
        ms.change(after=[b"1", b"hidden-1", b"a"]),
        ms.change(before=[b"1", b"hidden-1", b"a"], after=[b"2", b"hidden-2", b"b"]),
        ms.change(before=[b"2", b"hidden-2", b"b"]),
    ]
    columns = [ms.ID, SECRET, ms.WHAT]
    copied = ms.copied(
        ms.described("t", columns), ms.rows("t", [ms.change(after=[b"9", b"hidden-9", b"z"])], time_s=0)
    )
    streamed = ms.transaction(ms.described("t", columns), ms.rows("t", changes))
    made = log.take(copied, streamed, **settings)
    assert log.rows(made) == [
        ("r", {"id": "9", "what": "z"}),
        ("c", {"id": "1", "what": "a"}),
        ("u", {"id": "2", "what": "b"}),
        ("d", {"id": "2", "what": None}),
    ]
    assert b"hidden" not in log.data
    assert log.facts().left_out == ("secret",)


def test_an_excluded_column_added_later_is_left_out_from_its_first_row_on() -> None:
    log = Log()
    exclude: dict[str, Any] = {"columns_exclude": ["*.*.secret"]}
    log.rows(log.take(_written(ms.ID, values=[b"1"]), **exclude))
    made = log.take(
        _written(ms.ID, SECRET, ms.WHAT, values=[b"2", b"hidden", b"b"], gtid="MySQL56/a:1-6"), **exclude
    )
    assert log.rows(made) == [("c", {"id": "2", "what": "b"})]
    assert b"hidden" not in log.data


def test_a_key_is_never_left_out() -> None:
    log = Log()
    made = log.take(_written(ms.ID, SECRET, values=[b"1", b"hidden"]), columns_exclude=["*.*.*"])
    assert log.rows(made) == [("c", {"id": "1"})]


def test_a_column_of_any_type_may_be_left_out() -> None:
    log = Log()
    made = log.take(_written(ms.ID, STRANGE, values=[b"1", b"?"]), columns_exclude=["*.*.strange"])
    assert log.rows(made) == [("c", {"id": "1"})]


def test_partial_documents_are_matched_although_excluded_ones_precede_them() -> None:
    log = Log()
    columns = [ms.ID, PAPER, OTHER_PAPER]
    other = b"JSON_REPLACE(%s, _utf8mb4'$.b', CAST(2 as JSON))"
    papers = {True: b"JSON_SET(%s, _utf8mb4'$.a', CAST(7 as JSON))", False: b'{"a": 7}'}
    changes = [
        ms.change(
            before=[b"1", b'{"a": 1}', b'{"b": 1}'],
            after=[b"1", paper, other],
            data=[True, True, True],
            json=[is_change, True],
        )
        for is_change, paper in papers.items()
    ]
    made = log.take(
        ms.transaction(ms.described("t", columns), ms.rows("t", changes)), columns_exclude=["*.*.paper"]
    )
    assert log.rows(made) == [("u", {"id": "1", "other": '{"b": 2}'})] * 2
    assert b"_utf8mb4" not in log.data


def test_a_column_excluded_later_disappears_and_one_included_later_is_unknown_in_older_rows() -> None:
    log = Log()
    columns = ms.ID, SECRET
    log.rows(log.take(_written(*columns, values=[b"1", b"open"])))
    made = log.take(
        _written(*columns, values=[b"2", b"hidden"], gtid="MySQL56/a:1-6"), columns_exclude=["*.*.secret"]
    )
    assert log.rows(made) == [("c", {"id": "2"})]
    assert b"hidden" not in log.data
    made = log.take(_written(*columns, values=[b"3", b"open"], gtid="MySQL56/a:1-7"))
    assert log.rows(made) == [("c", {"id": "3", "secret": "open"})]
    facts = log.facts()
    # A mirror stops here: nobody sent the column's values of its rows.
    assert [(column.name, column.unknown) for column in facts.columns] == [("id", False), ("secret", True)]
    assert facts.left_out == ()


def test_values_are_hidden_before_all_shards_have_described_the_table() -> None:
    log = Log()
    log.rows(log.take(_written(ms.ID, SECRET, values=[b"1", b"open"])))
    source = VitessSource.model_validate(
        {"hosts": ["h:1"], "keyspace": ms.KEYSPACE, "columns_exclude": ["*.*.secret"]}
    )
    tables = LogTables(log.in_force, lambda *_: (None, ""))
    tables.keep_shards([ms.SHARD, "80-"])
    made = Transcoder(ms.KEYSPACE, ms.SHARD, tables, left_out=source.disclosure.left_out).transcode(
        [_written(ms.ID, SECRET, values=[b"2", b"hidden"], gtid="MySQL56/a:1-6")], 100
    )
    known = [frame for key, frame in log.in_force.items() if not key.startswith("S")]
    [changes] = decode_block(made.frames, 0, None, known)
    assert changes.rows().to_pylist()[0]["secret"] is None
    assert b"hidden" not in made.frames.tobytes()
    assert kept_frames(made.frames)


@pytest.mark.slow
def test_a_capture_keeps_excluded_values_out_of_its_log_in_copies_and_streams(tmp_path: Path) -> None:
    with (
        FakeVtgate("0") as vtgate,
        capturing(
            tmp_path, vtgate.address, snapshot="initial", columns_exclude=["shop.counters.counter"]
        ) as found,
    ):
        vtgate.write("0", (1, 77_777))
        found.wait_for_shards("0")
        vtgate.write("0", (2, 77_778))
        found.wait_for_rows(2)
    # At its end, everything appended is durable.
    assert [(change.op, change.row) for change in found.changes()] == [("r", {"id": "1"}), ("c", {"id": "2"})]
    assert b"7777" not in found.frames().tobytes()
