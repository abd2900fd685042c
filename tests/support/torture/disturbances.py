"""What disturbs a pipeline in `chaos`: actors with one act at a time each, from one seed.

Each act has its own transaction. An act that the server refuses, because another actor was quicker, is rolled
back and counts as done. All values of a masked column begin with `PLAIN`, so plain text in a sink's files
is recognised.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import errors, sql

#: The beginning of each value of a masked column.
PLAIN = "plain-text-"

#: Errors that an act may meet because of the other actors.
EXPECTED = (
    errors.CheckViolation,
    errors.DeadlockDetected,
    errors.DuplicateColumn,
    errors.LockNotAvailable,
    errors.NumericValueOutOfRange,
    errors.ObjectInUse,
    errors.QueryCanceled,
    errors.UndefinedColumn,
    errors.UniqueViolation,
)

#: `orders` gets and loses columns, also with defaults; `people` has the masked column; `documents` is
#: rewritten again and again; `events` is partitioned. Columns that are added and dropped are named x….
SCHEMA = """
create table orders (uid bigint primary key, code text not null, amount numeric(12, 2), body text);
alter table orders alter body set storage external;
create table people (uid bigint primary key, mail text, note text);
create table documents (uid bigint primary key, body text, size int);
alter table documents alter body set storage external;
alter table documents replica identity full;
create table events (uid bigint primary key, kind text) partition by hash (uid);
create table events_0 partition of events for values with (modulus 2, remainder 0);
create table events_1 partition of events for values with (modulus 2, remainder 1);
"""
TABLES = ("orders", "people", "documents", "events")
#: The number of the masked column: its name changes.
MASKED_TABLE, MASKED_NUMBER = "people", 2
#: Tables that acts rewrite: an added column's default for older rows is lost by that.
REWRITTEN = ("documents",)

_UID_MAX = 400
_LARGE = 4000


@dataclass
class Surroundings:
    """What all actors share.

    :ivar lock_s_max: how long a lock on a whole table is held at most.
    :ivar resting: set when the actors are to end.
    :ivar request: requests a snapshot of a table, with a condition or without.
    """

    dsn: str
    lock_s_max: float
    resting: threading.Event
    request: Callable[[str, str | None], None]

    def connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.dsn, options="-c lock_timeout=200ms", prepare_threshold=None)


Act = Callable[[random.Random, Surroundings, psycopg.Connection[Any]], None]


def create(dsn: str, rng: random.Random) -> None:
    """Make the tables, with rows."""
    with psycopg.connect(dsn) as connection:
        connection.execute(SCHEMA)
        for table in TABLES:
            for _ in range(200):
                _upsert(rng, connection, table)


def touch(dsn: str, rng: random.Random) -> None:
    """Commit a new row in each table, so that schema changes show in the stream."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for table in TABLES:
            connection.execute(f"delete from {table} where uid = 0")
            _upsert(rng, connection, table, uid=0)


# ------------------------------------------------------------------ acts


def change_rows(rng: random.Random, _: Surroundings, connection: psycopg.Connection[Any]) -> None:
    """A transaction with a few changes of several tables, a part of it rolled back now and then."""
    for _number in range(rng.choice((1, 2, 5, 20))):
        table = rng.choice(TABLES)
        with connection.transaction() as part:
            _change_row(rng, connection, table)
            if rng.random() < 0.1:
                raise psycopg.Rollback(part)
    if rng.random() < 0.1:
        connection.rollback()


def change_columns(rng: random.Random, _: Surroundings, connection: psycopg.Connection[Any]) -> None:
    """Add, drop or rename a column, or change its type."""
    table = rng.choice(TABLES)
    added = [name for name in _columns(connection, table) if name.startswith("x")]
    name = f"x{rng.randrange(10_000)}"
    kind = rng.choice(("int", "text", "numeric(8,2)", "varchar(20)"))
    act = rng.choice(("add", "add", "drop", "rename", "retype"))
    if act == "add" and len(added) < 6:
        default = ""
        if table not in REWRITTEN and rng.random() < 0.5:
            default = " default 'd'" if kind in {"text", "varchar(20)"} else " default 7"
        connection.execute(f"alter table {table} add {name} {kind}{default}")
    elif act == "drop" and added:
        connection.execute(f"alter table {table} drop {rng.choice(added)}")
    elif act == "rename" and added:
        connection.execute(f"alter table {table} rename {rng.choice(added)} to {name}")
    elif act == "retype" and table in REWRITTEN:
        connection.execute("alter table documents alter size type bigint")


def rename_masked_column(rng: random.Random, _: Surroundings, connection: psycopg.Connection[Any]) -> None:
    """Rename the masked column."""
    old = masked_name(connection)
    connection.execute(
        sql.SQL("alter table people rename {} to {}").format(
            sql.Identifier(old), sql.Identifier(f"mail{rng.randrange(10_000)}")
        )
    )


def analyze(rng: random.Random, _: Surroundings, connection: psycopg.Connection[Any]) -> None:
    """ANALYZE some of the tables or all: the server sends their descriptions again."""
    connection.execute(rng.choice(("analyze", *(f"analyze {table}" for table in TABLES))))


def truncate(rng: random.Random, _: Surroundings, connection: psycopg.Connection[Any]) -> None:
    """TRUNCATE one or several tables, and go on in the same transaction."""
    named = rng.sample(TABLES, rng.choice((1, 1, 2)))
    connection.execute(f"truncate {', '.join(named)}")
    for table in named:
        for _number in range(rng.randrange(30)):
            _upsert(rng, connection, table)


def rewrite(_: random.Random, __: Surroundings, connection: psycopg.Connection[Any]) -> None:
    """VACUUM FULL: the table gets another file, perhaps while a snapshot of it is under way."""
    connection.commit()
    connection.autocommit = True
    for table in REWRITTEN:
        connection.execute(f"vacuum full {table}")


def hold_lock(rng: random.Random, around: Surroundings, connection: psycopg.Connection[Any]) -> None:
    """Hold an exclusive lock on a table, or on a partition, for long."""
    connection.execute(f"lock table {rng.choice((*TABLES, 'events_0'))} in access exclusive mode")
    around.resting.wait(rng.uniform(0, around.lock_s_max))


def stay_open(rng: random.Random, around: Surroundings, connection: psycopg.Connection[Any]) -> None:
    """Leave a transaction open that has written."""
    _change_row(rng, connection, rng.choice(TABLES))
    around.resting.wait(rng.uniform(0, around.lock_s_max))


def ask_for_snapshot(rng: random.Random, around: Surroundings, _: psycopg.Connection[Any]) -> None:
    """Request a snapshot of a whole table or of a part."""
    where = f"uid % 3 = {rng.randrange(3)}" if rng.random() < 0.3 else None
    around.request(f"public.{rng.choice(TABLES)}", where)


#: Each actor: its acts with their weights, and its longest rest between two acts, in seconds.
ACTORS: dict[str, tuple[dict[Act, int], float]] = {
    "writer 1": ({change_rows: 1}, 0.05),
    "writer 2": ({change_rows: 30, truncate: 1}, 0.05),
    "owner": ({change_columns: 4, rename_masked_column: 1}, 2.0),
    "maintenance": ({analyze: 4, rewrite: 1}, 2.0),
    "holder": ({hold_lock: 2, stay_open: 1}, 5.0),
    "operator": ({ask_for_snapshot: 1}, 15.0),
}


def leave_out(names: Collection[str]) -> None:
    """Remove the acts of these names from all actors."""
    for acts, _ in ACTORS.values():
        for act in [act for act in acts if act.__name__ in names]:
            del acts[act]


def act_on(name: str, seed: str, around: Surroundings) -> None:
    """Let the actor `name` act until it is time to rest."""
    rng = random.Random(f"{name} {seed}")
    acts, rest_s_max = ACTORS[name]
    while not around.resting.wait(rng.uniform(0, rest_s_max)):
        if not acts:
            continue
        act = rng.choices(list(acts), list(acts.values()))[0]
        connection = around.connect()
        try:
            with connection:
                act(rng, around, connection)
        except EXPECTED:
            pass


# ------------------------------------------------------------------ rows


def masked_name(connection: psycopg.Connection[Any]) -> str:
    """Return the present name of the masked column."""
    row = connection.execute(
        "select attname from pg_attribute where attrelid = %s::regclass and attnum = %s",
        [MASKED_TABLE, MASKED_NUMBER],
    ).fetchone()
    assert row is not None
    return str(row[0])


def _columns(connection: psycopg.Connection[Any], table: str) -> list[str]:
    rows = connection.execute(
        "select attname from pg_attribute where attrelid = %s::regclass and attnum > 0 and not attisdropped",
        [table],
    ).fetchall()
    return [name for (name,) in rows]


def _change_row(rng: random.Random, connection: psycopg.Connection[Any], table: str) -> None:
    uid = rng.randrange(1, _UID_MAX)
    act = rng.random()
    if act < 0.6:
        _upsert(rng, connection, table, uid=uid)
    elif act < 0.8:
        connection.execute(f"delete from {table} where uid = %s", [uid])
    elif act < 0.9:
        connection.execute(f"update {table} set uid = %s where uid = %s", [rng.randrange(1, _UID_MAX), uid])
    else:
        # Large values are not sent with this update.
        connection.execute(f"update {table} set uid = uid where uid between %s and %s", [uid, uid + 5])


def _upsert(
    rng: random.Random, connection: psycopg.Connection[Any], table: str, uid: int | None = None
) -> None:
    """Upsert a row; a column that was added meanwhile may get a value, too."""
    values: dict[str, Any] = {"uid": rng.randrange(1, _UID_MAX) if uid is None else uid}
    match table:
        case "orders":
            values |= {"code": f"c{rng.randrange(99)}", "amount": rng.randrange(10**6) / 100}
            values |= {"body": "b" * rng.choice((5, _LARGE)) + str(rng.random())}
        case "people":
            values |= {masked_name(connection): PLAIN + str(rng.random()), "note": str(rng.random())}
        case "documents":
            values |= {"body": "d" * rng.choice((5, _LARGE)) + str(rng.random()), "size": rng.randrange(99)}
        case _:
            values |= {"kind": f"k{rng.randrange(99)}"}
    names = [sql.Identifier(name) for name in values]
    statement = sql.SQL("insert into {} ({}) values ({}) on conflict (uid) do update set {}").format(
        sql.Identifier(table),
        sql.SQL(", ").join(names),
        sql.SQL(", ").join([sql.Placeholder()] * len(values)),
        sql.SQL(", ").join(sql.SQL("{} = excluded.{}").format(name, name) for name in names),
    )
    connection.execute(statement, list(values.values()))
    added = [name for name in _columns(connection, table) if name.startswith("x")]
    if added:
        change = sql.SQL("update {} set {} = '5' where uid = %s")
        connection.execute(
            change.format(sql.Identifier(table), sql.Identifier(rng.choice(added))), [values["uid"]]
        )
