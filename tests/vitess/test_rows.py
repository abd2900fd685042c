"""Responses of VStream to frames of the log: transactions, copies, differing shapes, and what is refused."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable

import numpy as np
import pytest

from tailrace.decode.changes import decode_block
from tailrace.errors import Kind, Policy, TailraceError
from tailrace.protocol import frames, metadata_frames
from tailrace.sources.vitess.connection import vstream_pb2 as pb
from tailrace.sources.vitess.resharding.events import JournalReached, PositionReached
from tailrace.sources.vitess.rows import events
from tailrace.sources.vitess.rows.column_defaults import asked_by
from tailrace.sources.vitess.rows.tables import LogTables
from tailrace.sources.vitess.rows.transcoder import Transcoder
from tailrace.sources.vitess.streaming.shard_health import ShardProgress
from tailrace.sources.vitess.streaming.stream_events import events_of
from tests.support.vitess import messages as ms
from tests.support.vitess.reading import UNCHANGED, read

COLUMNS = [ms.ID, ms.WHAT]
OTHER = "80-"


def _transcoder(tables: LogTables | None = None, shard: str = ms.SHARD) -> Transcoder:
    return Transcoder(ms.KEYSPACE, shard, tables or LogTables({}))


def _insert(key: int, what: bytes | None = b"a", table: str = "t", shard: str = ms.SHARD) -> pb.VEvent:
    return ms.rows(table, [ms.change(after=[b"%d" % key, what])], shard)


def _states(data: frames.Bytes) -> dict[str, dict[str, object]]:
    return metadata_frames.shard_states(dict(metadata_frames.kept_frames(data)))


def _value(column: ms.ColumnGiven, value: bytes, *, labels: bool = True) -> str | None:
    """Return the text of a value in the log."""
    described = ms.described("t", [ms.ID, column], labels=labels)
    inserted = ms.rows("t", [ms.change(after=[b"1", value])])
    return read(_transcoder().transcode([ms.transaction(described, inserted)], 1).frames)[0].row[column[0]]


def test_a_transaction_has_the_time_of_its_commit_and_its_shards_state() -> None:
    begin = ms.event(pb.BEGIN, time_s=5)
    end = ms.event(pb.COMMIT, time_s=9)
    came = ms.response(
        begin, ms.described("t", COLUMNS), _insert(1), ms.vgtid("MySQL56/a:1-7", ms.SHARD, (), OTHER), end
    )
    made = _transcoder().transcode([came], 40)
    assert [change.time_us for change in read(made.frames, position=40)] == [9_000_000]
    assert (made.position, made.rows, made.is_open) == (41, 1, False)
    assert _states(made.frames) == {"shop/-80": {"gtid": "MySQL56/a:1-7"}}
    found = list(made.events)
    assert [event.kind for event in found] == [events.BEGIN, events.VGTID, events.COMMIT]
    assert [event.at for event in found] == sorted(event.at for event in found)
    assert found[-1].at == len(made.frames)
    assert pb.VGtid.FromString(made.events.of(events.VGTID)[0].body).shard_gtids[1].shard == ms.SHARD


def test_a_copys_position_is_in_the_state_and_its_last_key_in_the_event() -> None:
    last = pb.TableLastPk(table_name="t", last_pk=pb.QueryResult(rows=[ms.row([b"5"])]))
    described = ms.described("t", COLUMNS)
    transcoder = Transcoder(ms.KEYSPACE, ms.SHARD, LogTables({}), {"epoch": 2})
    made = transcoder.transcode(
        [
            ms.copied(described, gtid="MySQL56/a:1-7"),
            ms.copied(ms.rows("t", [ms.change(after=[b"1", b"x"])], time_s=0), tables=[last]),
        ],
        1,
    )
    assert _states(made.frames) == {"shop/-80": {"epoch": 2, "gtid": "MySQL56/a:1-5"}}
    *_, (event, _) = events_of(ms.SHARD, 1, made, ShardProgress(), is_copied=True)
    assert isinstance(event, PositionReached)
    assert event.last_keys is not None
    assert pb.TableLastPk.FromString(base64.b64decode(event.last_keys["t"])) == last


def test_what_was_copied_just_before_a_journal_is_known_to_those_who_take_over() -> None:
    last = pb.TableLastPk(table_name="t", last_pk=pb.QueryResult(rows=[ms.row([b"5"])]))
    journal = ms.event(pb.JOURNAL, journal=pb.Journal(id=7, migration_type=pb.SHARDS))
    made = _transcoder().transcode(
        [
            ms.copied(
                ms.described("t", COLUMNS),
                ms.rows("t", [ms.change(after=[b"1", b"x"])], time_s=0),
                tables=[last],
            ),
            ms.transaction(journal, gtid="MySQL56/a:1-6"),
        ],
        1,
    )
    (copied, _), (reached, _) = events_of(ms.SHARD, 1, made, ShardProgress(), is_copied=True)
    assert isinstance(copied, PositionReached)
    assert copied.last_keys is not None
    assert copied.last_keys.keys() == {"t"}
    assert isinstance(reached, JournalReached)


def test_rows_of_a_copy_are_snapshot_rows_and_keep_unusual_characters() -> None:
    odd = 'tab\t line\n return\r back\\slash \\N "Ñ"'.encode()
    copy = ms.copied(
        ms.described("t", COLUMNS),
        *(
            ms.rows("t", [ms.change(after=[b"%d" % key, text])], time_s=0)
            for key, text in ((1, odd), (2, None))
        ),
    )
    made = _transcoder().transcode([copy], 7, time_us=123)
    found = read(made.frames, position=7)
    assert [(change.op, change.row["what"]) for change in found] == [("r", odd.decode()), ("r", None)]
    assert {change.time_us for change in found} == {123}
    assert made.position == 8


def test_a_transaction_waits_for_its_commit_however_responses_are_divided() -> None:
    stream = ms.transaction(ms.described("t", COLUMNS), _insert(1), _insert(2))
    parsed = pb.VStreamResponse.FromString(stream).events
    transcoder = _transcoder()
    for event in parsed[:-1]:
        made = transcoder.transcode([ms.response(event)], 1)
        assert not len(made.frames)
    assert transcoder.kept_bytes == len(stream) - len(ms.response(parsed[-1]))
    made = transcoder.transcode([ms.response(parsed[-1])], 1)
    assert len(read(made.frames)) == 2
    assert transcoder.kept_bytes == 0


def test_a_large_transaction_can_be_transcoded_in_parts() -> None:
    transcoder = _transcoder()
    head = ms.response(ms.event(pb.BEGIN, time_s=5), ms.described("t", COLUMNS), _insert(1))
    parts = [transcoder.transcode([head], 9, cut=True)]
    parts.append(transcoder.transcode([ms.response(_insert(2))], 9, cut=True))
    assert [part.is_open for part in parts] == [True, True]
    assert parts[1].position == 9
    parts.append(
        transcoder.transcode(
            [ms.response(_insert(3), ms.vgtid("MySQL56/a:1"), ms.event(pb.COMMIT, time_s=6))], 9
        )
    )
    assert (parts[2].is_open, parts[2].position) == (False, 10)
    found = read(np.concatenate([part.frames for part in parts]), position=9)
    assert [change.row["id"] for change in found] == ["1", "2", "3"]
    assert {change.time_us for change in found} == {5_000_000}  # the rest had not come yet


def test_a_begin_inside_a_transaction_is_refused() -> None:
    transcoder = _transcoder()
    head = ms.response(ms.event(pb.BEGIN), ms.described("t", COLUMNS), _insert(1))
    assert transcoder.transcode([head], 9, cut=True).is_open
    with pytest.raises(TailraceError, match="begins inside another one") as caught:
        transcoder.transcode([head], 9, cut=True)
    assert caught.value.policy is Policy.RETRY


def test_only_an_update_of_the_key_has_the_old_key() -> None:
    changes = [
        ms.change([b"1", b"a"], [b"2", b"a"]),
        ms.change([b"2", b"a"], [b"2", b"b"]),
        ms.change([b"2", b"b"]),
    ]
    made = _transcoder().transcode([ms.transaction(ms.described("t", COLUMNS), ms.rows("t", changes))], 1)
    (table,) = decode_block(made.frames, 0, None, [])
    assert [dict(key or ()) for key in table.old_key_texts().to_pylist()] == [{"id": "1"}, {}, {}]
    assert table.relation is not None
    assert table.relation.key == ("id",)


def test_a_table_without_a_key_has_complete_old_rows() -> None:
    columns = [(*ms.ID[:3], 0, ms.BINARY), ms.WHAT]
    changes = [ms.change([b"1", None], [b"1", b"b"]), ms.change([b"1", b"b"])]
    made = _transcoder().transcode([ms.transaction(ms.described("t", columns), ms.rows("t", changes))], 1)
    (table,) = decode_block(made.frames, 0, None, [])
    before = table.images().column("before").to_pylist()
    assert before == [{"id": 1, "what": None}, {"id": 1, "what": "b"}]


@pytest.mark.parametrize("envelope", [ms.transaction, ms.copied])
def test_w15_vitess_internal_tables_and_tables_that_are_not_captured_are_excluded(
    envelope: Callable[..., bytes],
) -> None:
    names = [
        "_vt_vrp_6ace8bcef73211ea87e9f875a4d24e90_20200915120410_",
        "_vt_HOLD_6ace8bcef73211ea87e9f875a4d24e90_20200915120410",
        "_6ace8bce_f732_11ea_87e9_f875a4d24e90_20200915120410_vrepl",
        "_t_old", "other", "t", "_vt_own",
    ]  # fmt: skip
    transcoder = Transcoder(ms.KEYSPACE, ms.SHARD, LogTables({}), captures=lambda table: table != "other")
    described = [ms.described(name, COLUMNS) for name in names]
    made = transcoder.transcode([envelope(*described, *(_insert(1, table=name) for name in names))], 1)
    assert {change.table for change in read(made.frames)} == {"shop.t", "shop._vt_own"}


def test_events_of_other_shards_in_the_same_stream_are_skipped() -> None:
    # When shards merge, vtgate wants all of them in one stream.
    other = ms.transaction(
        ms.described("t", COLUMNS, OTHER), _insert(5, shard=OTHER), shard=OTHER, gtid="MySQL56/b:1-9"
    )
    own = ms.transaction(ms.described("t", COLUMNS), _insert(1))
    made = _transcoder().transcode([other, own, other], 1)
    assert [change.row["id"] for change in read(made.frames)] == ["1"]
    assert len(made.events) == 3


def test_w17_a_table_created_after_the_start_is_captured() -> None:
    transcoder = _transcoder()
    transcoder.transcode([ms.transaction(ms.described("t", COLUMNS), _insert(1))], 1)
    later = ms.transaction(ms.described("later", COLUMNS), _insert(2, table="later"))
    assert [change.table for change in read(transcoder.transcode([later], 2).frames)] == ["shop.later"]


def test_w13_labels_are_recognised_by_each_description_not_by_the_end_of_another_shards_copy() -> None:
    """A copy has labels, a stream of an old server numbers: these are refused, whatever was copied."""
    enum: ms.ColumnGiven = ("e", 2074, "enum('a','b')", 0, 255)
    changes = ms.rows("t", [ms.change(after=[b"1", b"b"])], time_s=0)
    transcoder = _transcoder()
    completed = pb.VEvent(type=pb.COPY_COMPLETED, keyspace=ms.KEYSPACE, shard=OTHER)
    copying = [
        ms.copied(ms.described("t", [ms.ID, enum]), changes), ms.response(completed), ms.copied(changes)
    ]  # fmt: skip
    found = read(transcoder.transcode(copying, 1).frames)
    assert [(change.op, change.row["e"]) for change in found] == [("r", "b"), ("r", "b")]
    with pytest.raises(TailraceError, match="numbers of its labels"):
        transcoder.transcode([ms.transaction(ms.described("t", [ms.ID, enum], labels=False), changes)], 9)


def test_a_shard_without_changes_reports_its_position() -> None:
    transcoder = _transcoder()
    made = transcoder.transcode(
        [ms.transaction(gtid="MySQL56/a:1-8"), ms.response(ms.event(pb.HEARTBEAT))], 5
    )
    assert (len(made.frames), made.position) == (0, 5)
    assert transcoder.has_unwritten_position


def test_a_table_and_its_columns_keep_their_numbers_on_all_shards_and_after_a_restart() -> None:
    tables = LogTables({})
    first, second = _transcoder(tables), _transcoder(tables, OTHER)
    one = first.transcode([ms.transaction(ms.described("t", COLUMNS), _insert(1))], 1)
    same = second.transcode(
        [
            ms.transaction(
                ms.described("t", COLUMNS[::-1], OTHER),
                ms.rows("t", [ms.change(after=[b"b", b"2"])], OTHER),
                shard=OTHER,
            )
        ],
        one.position,
    )
    in_force: dict[str, bytes] = {}
    found = read(np.concatenate((one.frames, same.frames)), in_force)
    assert [change.row for change in found] == [{"id": "1", "what": "a"}, {"id": "2", "what": "b"}]
    restarted = LogTables(in_force)
    assert restarted.shape(ms.KEYSPACE, "t") == tables.shape(ms.KEYSPACE, "t")
    again = _transcoder(restarted).transcode([ms.transaction(ms.described("t", COLUMNS), _insert(3))], 9)
    assert metadata_frames.schema_frames(again.frames) == []  # the log has them already


def _known(text: str | None) -> LogTables:
    return LogTables({}, lambda *_: (text, ""))


def test_the_arrays_for_a_shards_tables_do_not_grow_with_other_shards() -> None:
    tables = LogTables({})
    tables.keep_shards([ms.SHARD, OTHER])
    first, second = _transcoder(tables), _transcoder(tables, OTHER)
    for number in range(50):
        for transcoder, shard in ((first, ms.SHARD), (second, OTHER)):
            name = f"t_{number}"
            events = ms.described(name, COLUMNS, shard), _insert(1, table=name, shard=shard)
            transcoder.transcode([ms.transaction(*events, shard=shard)], 2 * number + 1)
    arrays = [(each._shapes.sources, each._shapes.targets) for each in (first, second)]
    assert [[len(array) for array in of_a_shard] for of_a_shard in arrays] == [[128, 128]] * 2


def test_rows_of_other_shards_are_right_while_ddl_has_reached_only_one_shard() -> None:
    tables = _known("7")
    tables.keep_shards([ms.SHARD, OTHER])
    first, second = _transcoder(tables), _transcoder(tables, OTHER)
    more = [*COLUMNS, ("more", ms.BIGINT, "bigint", 0, ms.BINARY)]
    in_force: dict[str, bytes] = {}
    position = 1

    def take(transcoder: Transcoder, came: bytes) -> list[dict[str, str | None]]:
        nonlocal position
        made = transcoder.transcode([came], position)
        found = read(made.frames, in_force, position)
        position = made.position
        return [change.row for change in found]

    take(first, ms.transaction(ms.described("t", COLUMNS), _insert(1)))
    take(second, ms.transaction(ms.described("t", COLUMNS, OTHER), _insert(2, shard=OTHER), shard=OTHER))
    assert take(
        first, ms.transaction(ms.described("t", more), ms.rows("t", [ms.change(after=[b"3", b"a", b"9"])]))
    ) == [{"id": "3", "what": "a", "more": "9"}]
    # The other shard will have the default in rows that it inserts before it has the column.
    changes = [ms.change(after=[b"4", b"a"]), ms.change([b"4", b"a"], [b"4", b"b"])]
    assert take(second, ms.transaction(ms.rows("t", changes, OTHER), shard=OTHER)) == [
        {"id": "4", "what": "a", "more": "7"},
        {"id": "4", "what": "b", "more": UNCHANGED},
    ]
    take(second, ms.transaction(ms.described("t", more, OTHER), shard=OTHER))
    number = tables.shape(ms.KEYSPACE, "t").columns[2].number
    # Dropped on one shard, then on all: the column disappears with the last one.
    take(first, ms.transaction(ms.described("t", COLUMNS), _insert(5)))
    assert len(tables.shape(ms.KEYSPACE, "t").columns) == 3
    take(second, ms.transaction(ms.described("t", COLUMNS, OTHER), _insert(6, shard=OTHER), shard=OTHER))
    assert [column.name for column in tables.shape(ms.KEYSPACE, "t").columns] == ["id", "what"]
    # A column of the same name is a new one, also after a restart.
    tables = LogTables(in_force, lambda *_: (None, ""))
    _transcoder(tables).transcode(
        [
            ms.transaction(
                ms.described("t", more),
                ms.rows("t", [ms.change(after=[b"7", b"a", None])]),
            )
        ],
        position,
    )
    assert tables.shape(ms.KEYSPACE, "t").columns[2].number > number


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ("int", "bigint", "bigint"),
        ("bigint", "bigint unsigned", "bigint unsigned"),
        ("varchar(10)", "varchar(20)", "varchar(20)"),
        ("text", "varchar(20)", "text"),
        ("decimal(10,2)", "decimal(8,4)", "decimal(12,4)"),
        ("timestamp(3)", "timestamp", "timestamp(3)"),
        ("float", "double", "double"),
    ],
)
def test_of_types_that_differ_between_shards_the_wider_one_is_used(one: str, other: str, found: str) -> None:
    for left, right in ((one, other), (other, one)):
        tables = LogTables({})
        tables.keep_shards([ms.SHARD, OTHER])
        for shard, declared in ((ms.SHARD, left), (OTHER, right)):
            column = ("c", 0, declared, 0, ms.UTF8MB4)
            described = ms.described("t", [ms.ID, column], shard)
            _transcoder(tables, shard).transcode([ms.transaction(described, shard=shard)], 1)
        assert tables.shape(ms.KEYSPACE, "t").columns[1].declared == found


@pytest.mark.parametrize(
    ("old", "new", "is_unknown"),
    [
        ("binary(4)", "binary(8)", True),
        ("binary(8)", "binary(4)", False),
        ("varbinary(8)", "binary(8)", True),
        ("binary(4)", "varbinary(4)", False),
        ("time(3)", "time", True),
        ("time(3)", "time(6)", False),
        ("int", "enum('a','b')", True),
        ("int unsigned", "set('a','b')", True),
        ("enum('a')", "enum('a','b')", False),
        ("int", "year", True),
        ("year", "year", False),
        ("int(5) unsigned zerofill", "varchar(10)", True),
        ("int", "varchar(10)", False),
        ("double", "double(10,2)", True),
        ("float", "double", False),
    ],
)
def test_older_values_are_unknown_where_mysql_changed_them_with_the_type(
    old: str, new: str, is_unknown: bool
) -> None:
    tables = LogTables({})
    tables.keep_shards([ms.SHARD])
    for declared in (old, new, new):
        described = ms.described("t", [ms.ID, ("c", 0, declared, 0, ms.UTF8MB4), ms.WHAT])
        _transcoder(tables).transcode([ms.transaction(described)], 1)
    _, found, other = tables.shape(ms.KEYSPACE, "t").columns
    assert (found.unknown, found.number, other.number) == (is_unknown, 4 if is_unknown else 2, 3)


@pytest.mark.parametrize(
    ("column", "told", "missing", "unknown"),
    [
        ((265, "bigint", 1 | 4096, 63), (None, ""), "0", False),
        ((265, "bigint", 0, 63), (None, ""), None, False),
        ((265, "bigint", 0, 63), ("5", ""), "5", False),
        ((265, "bigint", 0, 63), None, None, True),
        ((265, "bigint", 3, 63), (None, "auto_increment"), None, True),
        ((265, "bigint", 0, 63), (None, "VIRTUAL GENERATED"), None, True),
        ((2064, "datetime", 0, 63), ("CURRENT_TIMESTAMP", "DEFAULT_GENERATED"), None, True),
        ((2064, "datetime(3)", 0, 63), ("2024-01-01 00:00:00.000", ""), "2024-01-01 00:00:00.000", False),
        ((2061, "timestamp", 0, 63), ("2024-01-01 00:00:00", ""), None, True),
        ((18, "decimal(5,2)", 0, 63), ("0.50", ""), "0.50", False),
        ((1036, "double", 0, 63), ("1e20", ""), "1e+20", False),
        ((2073, "bit(4)", 0, 63), ("b'101'", ""), "0101", False),
        ((10264, "binary(3)", 0, 63), ("0x6162", ""), "\\x616200", False),
        ((6165, "varchar(9)", 0, 8), ("ä", ""), "ä", False),
        ((6165, "varchar(9)", 1 | 4096, 255), (None, ""), "", False),
        ((2074, "enum('a')", 1 | 4096, 255), (None, ""), None, True),
        # What InnoDB remembers of older rows counts, whatever the default is now.
        ((263, "int", 1 | 4096, 63), (None, "", "1", "80000005"), "5", False),
        ((263, "int", 0, 63), ("9", "", "1", None), None, False),
        ((257, "tinyint", 0, 63), ("9", "", "1", "7f"), "-1", False),
        ((778, "bigint unsigned", 0, 63), (None, "", "1", "8000000000000007"), str(2**63 + 7), False),
        ((6165, "varchar(9)", 1 | 4096, 255), (None, "", "1", "68c3a920"), "hé ", False),
        ((6167, "char(4)", 1 | 4096, 255), (None, "", "1", "61622020"), "ab", False),
        ((18, "decimal(10,2)", 0, 63), ("-1.50", "", "1", "7ffffffecd"), "-1.50", False),
        ((18, "decimal(10,2)", 1 | 4096, 63), (None, "", "1", "7ffffffecd"), None, True),
        ((18, "decimal(10,2)", 1 | 4096, 63), (None, "", "1", "8000000000"), "0.00", False),
        ((18, "decimal(10,2)", 0, 63), (None, "", "1", "8000000000"), None, True),
        ((265, "bigint", 0, 63), ("5", "", "0", None), "5", False),
        ((265, "bigint", 0, 63), ("5", "", None, None), "5", False),
    ],
)
def test_an_added_column_has_the_value_of_older_rows_or_is_unknown(
    column: tuple[int, str, int, int], told: tuple[str | None, ...] | None, missing: str | None, unknown: bool
) -> None:
    number, declared, flags, charset = column
    asked = []

    def query(sql: str, attempted: str, target: str) -> list[tuple[str | None, ...]]:
        asked.append((sql, target))
        return [] if told is None else [("it's", *told)]

    tables = LogTables({}, asked_by(query, ms.KEYSPACE, "PRIMARY"))
    transcoder = _transcoder(tables)
    transcoder.transcode([ms.transaction(ms.described("t", COLUMNS))], 1)
    assert asked == []  # no row is older than the table
    added = ("it's", number, declared, flags, charset)
    transcoder.transcode([ms.transaction(ms.described("t", [*COLUMNS, added]))], 1)
    found = tables.shape(ms.KEYSPACE, "t").columns[2]
    assert (found.missing, found.unknown) == (missing, unknown)
    assert [target for _, target in asked] == ["shop:-80@primary"]
    assert "column_name = 'it''s'" in asked[0][0]


def test_the_default_of_a_column_that_the_replica_lacks_is_asked_from_the_primary() -> None:
    tables = LogTables(
        {},
        asked_by(
            lambda _, __, target: [("more", "5", "")] if "primary" in target else [], ms.KEYSPACE, "replica"
        ),
    )
    transcoder = _transcoder(tables)
    for columns in (COLUMNS, [*COLUMNS, ("more", ms.BIGINT, "bigint", 0, ms.BINARY)]):
        transcoder.transcode([ms.transaction(ms.described("t", columns))], 1)
    found = tables.shape(ms.KEYSPACE, "t").columns[2]
    assert (found.missing, found.unknown) == ("5", False)


def test_without_the_privilege_for_innodbs_tables_an_added_column_has_its_present_default() -> None:
    def query(sql: str, attempted: str, target: str) -> list[tuple[str | None, ...]]:
        if "innodb" in sql:
            raise TailraceError(Kind.SOURCE_AUTH_FAILED, "Access denied")
        return [("more", "5", "")]

    assert asked_by(query, ms.KEYSPACE, "primary")(ms.SHARD, "t", "more") == ("5", "")


def test_a_changed_primary_key_applies_to_the_altered_shard() -> None:
    tables = _known(None)
    tables.keep_shards([ms.SHARD, OTHER])
    both = [ms.ID, (*ms.WHAT[:3], ms.PRIMARY, ms.UTF8MB4)]

    def describe(shard: str, columns: list[ms.ColumnGiven], of: LogTables = tables) -> tuple[str, ...]:
        came = ms.transaction(ms.described("t", columns, shard), shard=shard)
        _transcoder(of, shard).transcode([came], 1)
        return of.shape(ms.KEYSPACE, "t").key

    assert describe(ms.SHARD, COLUMNS) == ("id",)
    assert describe(OTHER, COLUMNS) == ("id",)
    assert describe(ms.SHARD, both) == ("id", "what")
    in_force: dict[str, bytes] = {}
    made = _transcoder(LogTables({})).transcode([ms.transaction(ms.described("t", both), _insert(1))], 1)
    read(made.frames, in_force)
    restarted = LogTables(in_force)
    restarted.keep_shards([ms.SHARD, OTHER])
    assert describe(OTHER, COLUMNS, restarted) == ("id", "what")  # it is behind
    assert describe(OTHER, COLUMNS, restarted) == ("id", "what")  # and is read again
    assert describe(OTHER, both, restarted) == ("id", "what")


@pytest.mark.parametrize(
    ("now", "described", "is_refused"),
    [
        ("id what other more", "id what other", False),  # the last column was added after all others
        ("id more what other", "id more what", True),
        ("id more what", "id more what", False),  # the last column was dropped
    ],
)
def test_rows_from_before_a_column_was_added_between_others_are_refused(
    now: str, described: str, is_refused: bool
) -> None:
    def columns(names: str) -> list[ms.ColumnGiven]:
        return [ms.ID, *((name, *ms.WHAT[1:]) for name in names.split()[1:])]

    transcoder = _transcoder(LogTables({}, lambda _, __, name: (None, "") if name in now.split() else None))
    transcoder.transcode([ms.transaction(ms.described("t", columns("id what other")))], 1)
    again = ms.transaction(ms.described("t", columns(described)))
    if not is_refused:
        transcoder.transcode([again], 2)
        return
    with pytest.raises(TailraceError, match=r"shop\.t on the shard '-80': its columns") as refused:
        transcoder.transcode([again], 2)
    assert refused.value.kind is Kind.SCHEMA_CHANGED


def test_without_a_shard_to_ask_an_added_column_is_unknown() -> None:
    tables = LogTables({})
    for columns in (COLUMNS[:1], COLUMNS):
        _transcoder(tables).transcode([ms.transaction(ms.described("t", columns))], 1)
    assert [column.unknown for column in tables.shape(ms.KEYSPACE, "t").columns] == [False, True]


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        (("c", 6165, "varchar(9)", 0, 28), "中a".encode("gbk"), "中a"),
        (("c", 6165, "varchar(9)", 0, 13), "日本".encode("shift_jis"), "日本"),
        # Where MySQL's character set is not Python's: what MySQL 8.0 returns.
        (("c", 6165, "varchar(9)", 0, 36), b"\xfc\xfd", "ⁿ²"),
        (("c", 6165, "varchar(9)", 0, 22), b"\x95", "•"),
        (("c", 6165, "varchar(9)", 0, 25), b"\xa1\xa2\xe2", "\u02bd\u02bcβ"),
        (("c", 6165, "varchar(9)", 0, 16), b"\xaf", "‾"),
        (("c", 6165, "varchar(9)", 0, 13), b"\x81\x5f\x81\x60", "\\〜"),
        (("c", 6165, "varchar(9)", 0, 1), b"\xf9\xd6\xf9\xdc\xa4\x40", "碁嫺一"),
        (("c", 6165, "varchar(9)", 0, 60), "🦩".encode("utf-32-be"), "🦩"),
        (("c", 6165, "varchar(9)", 0, 56), "🦩Ñ".encode("utf-16-le"), "🦩Ñ"),
        (("c", 6165, "varchar(9)", 0, 54), b"\xd8\x00", "\\xd800"),  # half a character
        (("c", 6165, "varchar(9)", 0, 54), b"abc", "abc"),
        (("c", 6165, "varchar(9)", 0, 28), b"\x81", "\\x81"),
        (("c", 18, "decimal(5,0) unsigned zerofill", 0, 63), b"00042", "42"),
        (("c", 18, "decimal(5,2)", 0, 63), b"-.00", "0.00"),
        (("c", 1036, "double", 0, 63), b"1.7976931348623157E+308", "1.7976931348623157e+308"),
        (("c", 1036, "double", 0, 63), b"5E-324", "5e-324"),
        (("c", 1036, "double", 0, 63), b"-0E+00", "-0"),
        (("c", 1036, "double", 0, 63), b"1e15", "1e+15"),
        (("c", 1036, "double", 0, 63), b"123456789012345", "123456789012345"),
        (("c", 1035, "float", 0, 63), b"0.0001", "0.0001"),
        (("c", 1035, "float", 0, 63), b"1E+06", "1e+06"),
        (("c", 1035, "float", 0, 63), b"inf", "inf"),
        (("c", 2074, "", 0, 255), b"x", "x"),
        (("c", 2083, "vector(2)", 0, 63), b"\0\0\x80?", "\\x0000803f"),
        (("c", 785, "year", 0, 63), b"0000", "0"),
    ],
)
def test_a_value_is_converted_to_postgresqls_text(column: ms.ColumnGiven, value: bytes, text: str) -> None:
    assert _value(column, value) == text


def test_invalid_dates_are_null_and_special_and_the_other_values_are_dates() -> None:
    columns = [ms.ID, ("d", 2062, "date", 0, 63), ("s", 2061, "timestamp", 0, 63)]
    given = [b"2024-02-29", b"2023-02-29", b"0000-00-00", b"2024-00-10", b"2024-04-31", b"2024-12-31"]
    changes = [ms.change(after=[b"%d" % key, day, day + b" 00:00:00"]) for key, day in enumerate(given)]
    made = _transcoder().transcode([ms.transaction(ms.described("t", columns), ms.rows("t", changes))], 1)
    (table,) = decode_block(made.frames, 0, None, [])
    rows = table.rows().to_pylist()
    for row, day in zip(rows, given, strict=True):
        if day in (b"2024-02-29", b"2024-12-31"):
            assert (str(row["d"]), row["_special"]) == (day.decode(), None)
        else:
            special = {"d": day.decode(), "s": f"{day.decode()} 00:00:00+00"}
            assert (row["d"], row["s"], dict(row["_special"])) == (None, None, special)


def test_a_text_that_is_not_utf8_does_not_affect_other_values() -> None:
    changes = [ms.change(after=[b"%d" % key, text]) for key, text in enumerate((b"a", b"\xff\xfe", b"b"))]
    made = _transcoder().transcode([ms.transaction(ms.described("t", COLUMNS), ms.rows("t", changes))], 1)
    assert [change.row["what"] for change in read(made.frames)] == ["a", "\\xfffe", "b"]


def test_w12_values_that_an_image_lacks_are_unchanged_or_taken_from_the_row_before() -> None:
    columns = [ms.ID, ms.WHAT, ("big", ms.BLOB, "blob", 0, ms.BINARY)]
    changes = [
        ms.change([b"1", b"a", None], [b"1", b"b", None], [True, True, False]),
        ms.change([b"1", b"b", None], [None, None, b"x"], [False, False, True]),
        ms.change(None, [b"2", b"b", None], [True, True, False]),
    ]
    made = _transcoder().transcode([ms.transaction(ms.described("t", columns), ms.rows("t", changes))], 1)
    assert [change.row for change in read(made.frames)] == [
        {"id": "1", "what": "b", "big": UNCHANGED},
        {"id": "1", "what": "b", "big": "\\x78"},
        {"id": "2", "what": "b", "big": None},
    ]


def test_w12_partial_documents_are_applied_to_the_ones_before() -> None:
    columns = [ms.ID, *((name, ms.JSON, "json", 0, ms.BINARY) for name in "jkl")]
    change = b"JSON_REPLACE(%s, _utf8mb4'$.a', CAST(2 as JSON))"
    old = [b"1", b'{"a": 1}', b'{"a": 1}', b"[1]"]
    came = ms.change(old, [b"1", change, b"", b"[1]"], [True] * 4, [True, True, False])
    plain = ms.change(old, [b"1", b"{}", None, b"[2]"])
    made = _transcoder().transcode(
        [ms.transaction(ms.described("t", columns), ms.rows("t", [came, plain, came]))], 1
    )
    rows = [change.row for change in read(made.frames)]
    assert rows[0] == rows[2] == {"id": "1", "j": '{"a": 2}', "k": '{"a": 1}', "l": "[1]"}
    assert rows[1] == {"id": "1", "j": "{}", "k": None, "l": "[2]"}


_FIRST = ms.described("t", COLUMNS)
_DOCUMENT = ms.described("t", [ms.ID, ("j", ms.JSON, "json", 0, 63)])
_REMOVAL = ms.change([b"1", None], [b"1", b"JSON_REMOVE(%s, _utf8mb4'$.a')"], json=[True])


def _of(number: int, declared: str, charset: int = 63, name: str = "c", *, labels: bool = True) -> pb.VEvent:
    return ms.described("t", [ms.ID, (name, number, declared, 0, charset)], labels=labels)


@pytest.mark.parametrize(
    ("kind", "words", "given"),
    [
        (Kind.DECODE_FAILED, "type 'sometype'", [_of(9, "sometype")]),
        (Kind.DECODE_FAILED, "collation, number 12,", [_of(6163, "text", 12)]),
        (Kind.DECODE_FAILED, "collation, number 2000,", [_of(6163, "text", 2000)]),
        (Kind.DECODE_FAILED, "Vitess does not know", [_of(6163, "text", 0)]),
        (Kind.DECODE_FAILED, "numbers of its labels", [_of(2074, "enum('a')", 255, labels=False)]),
        (Kind.DECODE_FAILED, "not ASCII", [_of(2074, "enum('ä')", 8)]),
        (Kind.DECODE_FAILED, "not ASCII", [_of(2075, "set('a')", 54)]),
        (Kind.SCHEMA_CHANGED, "does not know its name", [_of(265, "", name="@1")]),
        (Kind.DECODE_FAILED, "limits", [_of(2073, "bit(65)")]),
        (Kind.DECODE_FAILED, "one name", [ms.described("t", [ms.ID, ms.ID])]),
        (
            Kind.DECODE_FAILED,
            "more than 1664",
            [ms.described("t", [(f"c{n}", 265, "int", 0, 63) for n in range(1665)])],
        ),
        (Kind.SCHEMA_MISSING, "no FIELD event", [_insert(1)]),
        (Kind.SCHEMA_CHANGED, "number of columns", [_FIRST, ms.rows("t", [ms.change(after=[b"1"])])]),
        (Kind.PROTOCOL_VIOLATION, "neither", [_FIRST, ms.rows("t", [ms.change()])]),
        (
            Kind.SOURCE_MISCONFIGURED,
            "MINIMAL",
            [_FIRST, ms.rows("t", [ms.change(after=[b"1", None], data=[True, False])])],
        ),
        (Kind.SOURCE_MISCONFIGURED, "primary key", [_FIRST, ms.rows("t", [ms.change([None, b"a"])])]),
        (Kind.SOURCE_MISCONFIGURED, "statement", [ms.event(pb.INSERT)]),
        (Kind.PROTOCOL_VIOLATION, "type that this version", [ms.event(pb.UNKNOWN_EVENT)]),
        (Kind.PROTOCOL_VIOLATION, "characters that no GTID", [_FIRST, _insert(1), ms.vgtid('a"b')]),
        (Kind.SOURCE_MISCONFIGURED, "JSON document", [_DOCUMENT, ms.rows("t", [_REMOVAL])]),
    ],
)
def test_unsupported_columns_stop_the_transcoder_with_their_names(
    kind: Kind, words: str, given: list[pb.VEvent]
) -> None:
    with pytest.raises(TailraceError, match=words) as caught:
        _transcoder().transcode([ms.transaction(*given)], 1)
    assert caught.value.kind is kind
    assert caught.value.hint
    assert caught.value.context["shard"] == "shop/-80"


def test_a_row_outside_a_transaction_is_refused() -> None:
    with pytest.raises(TailraceError, match="outside a transaction"):
        _transcoder().transcode([ms.response(ms.described("t", COLUMNS), _insert(1), ms.event(pb.COMMIT))], 1)


def test_a_value_may_have_many_megabytes() -> None:
    columns = [ms.ID, ("big", ms.BLOB, "longblob", 0, ms.BINARY)]
    value = bytes(range(256)) * 40_000
    made = _transcoder().transcode(
        [
            ms.transaction(ms.described("t", columns)),
            ms.transaction(ms.rows("t", [ms.change(after=[b"1", value])])),
        ],
        1,
    )
    assert read(made.frames)[0].row["big"] == "\\x" + value.hex()


def test_damaged_responses_are_refused_and_never_read_beyond_their_end() -> None:
    columns = [ms.ID, ms.WHAT, ("j", ms.JSON, "json", 0, 63), ("b", 2073, "bit(9)", 0, 63)]
    change = ms.change(
        [b"1", b"a", b"{}", b"\0\1"], [b"1", None, b"", b"\1\0"], [True, True, True, False], [True]
    )
    whole = ms.transaction(ms.described("t", columns), ms.rows("t", [change] * 3)) + ms.copied(
        ms.rows("t", [ms.change(after=[b"2", b"x\ty", None, b"\1\1"])], time_s=0)
    )
    seed = random.randrange(2**32)
    source = random.Random(seed)
    outcomes: set[str] = set()
    for _ in range(1500):
        damaged = bytearray(whole)
        for _ in range(source.randint(1, 4)):
            damaged[source.randrange(len(damaged))] = source.randrange(256)
        if source.random() < 0.3:
            del damaged[source.randrange(len(damaged)) :]
        try:
            made = _transcoder().transcode([bytes(damaged)], 1, cut=source.random() < 0.3)
            outcomes.add("taken")
            if not made.is_open:
                frames.summarise(made.frames, frames.new_state(1))
        except TailraceError as error:
            outcomes.add(str(error.kind))
    assert {"taken", "protocol_violation"} <= outcomes, f"seed {seed}"
