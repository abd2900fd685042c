"""Random schema changes, each with the facts that a fold of the history needs to follow it.

PostgreSQL's stream does not contain a schema change: the next row merely has other columns, and
it does not tell whether a column was renamed, or dropped and another one added. Rows that are not
changed afterwards are not sent at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.support.differential import kinds
from tests.support.differential.kinds import BY_SQL, Kind
from tests.support.differential.statements import Cursor
from tests.support.differential.tables import Column, Table, quoted

if TYPE_CHECKING:
    from tests.support.differential.workload import Workload

Facts = list[dict[str, Any]]
Tables = dict[int, Table]
Alter = Callable[["Workload", Cursor, Tables], Facts]


def add_column(work: Workload, cursor: Cursor, tables: Tables) -> Facts:
    table = work.rng.choice(list(tables.values()))
    column = Column(_fresh(work, table), work.rng.choice(kinds.SMALL))
    cursor.execute(f"alter table {table.sql} add {quoted(column.name)} {column.kind.sql}")
    tables[table.oid] = replace(table, columns=(*table.columns, column))
    return [{"table": table.oid, "add": column.name, "value": None}]


def add_column_with_default(work: Workload, cursor: Cursor, tables: Tables) -> Facts:
    table = work.rng.choice(list(tables.values()))
    kind = work.rng.choice(
        [BY_SQL[sql] for sql in ("integer", "text", "timestamptz", "numeric(12,2)", "mood")]
    )
    column = Column(_fresh(work, table), kind, filled=True)
    value = cursor.one(f"select (%s::{kind.sql})::text", [kind.make(work.rng)])
    literal = "'" + value.replace("'", "''") + "'"
    cursor.execute(f"alter table {table.sql} add {quoted(column.name)} {kind.sql} default {literal}")
    tables[table.oid] = replace(table, columns=(*table.columns, column))
    return [{"table": table.oid, "add": column.name, "value": value}]


def drop_column(work: Workload, cursor: Cursor, tables: Tables) -> Facts:
    found = [
        (table, column)
        for table in tables.values()
        for column in table.columns
        if column.name not in (*table.key, "uid")
    ]
    if not found:
        return []
    table, column = work.rng.choice(found)
    cursor.execute(f"alter table {table.sql} drop {quoted(column.name)}")
    tables[table.oid] = table.with_column(column.name, None)
    return [{"table": table.oid, "drop": column.name}]


def rename_column(work: Workload, cursor: Cursor, tables: Tables) -> Facts:
    table = work.rng.choice(list(tables.values()))
    column = work.rng.choice([each for each in table.columns if each.name != "uid"] or [None])
    if column is None:
        return []
    name = _fresh(work, table)
    cursor.execute(f"alter table {table.sql} rename {quoted(column.name)} to {quoted(name)}")
    tables[table.oid] = table.with_column(column.name, replace(column, name=name))
    return [{"table": table.oid, "rename": [column.name, name]}]


def swap_columns(work: Workload, cursor: Cursor, tables: Tables) -> Facts:
    """Swap the names of two columns, by way of a third name."""
    table = work.rng.choice(list(tables.values()))
    names = [each.name for each in table.columns if each.name != "uid"]
    if len(names) < 2:
        return []
    one, other = work.rng.sample(names, 2)
    between = _fresh(work, table)
    facts: Facts = []
    for old, new in ((one, between), (other, one), (between, other)):
        cursor.execute(f"alter table {table.sql} rename {quoted(old)} to {quoted(new)}")
        table = table.with_column(old, replace(table.column(old), name=new))
        facts.append({"table": table.oid, "rename": [old, new]})
    tables[table.oid] = table
    return facts


def widen_column(work: Workload, cursor: Cursor, tables: Tables) -> Facts:
    found = [
        (table, column)
        for table in _rewritable(work, tables)
        for column in table.columns
        if column.kind.wider and not (table.partitioned and column.name in table.key)
    ]
    if not found:
        return []
    table, column = work.rng.choice(found)
    at = work.rng.randrange(len(column.kind.wider))
    sql = column.kind.wider[at]
    cursor.execute(f"alter table {table.sql} alter {quoted(column.name)} type {sql}")
    kind = Kind(sql, column.kind.make, column.kind.wider[at + 1 :])
    tables[table.oid] = table.with_column(column.name, replace(column, kind=kind))
    return [{"table": table.oid, "retype": column.name}]


def retype_column(work: Workload, cursor: Cursor, tables: Tables) -> Facts:
    """Change a type so that texts change with it; PostgreSQL says what they have become."""
    found = [
        (table, column)
        for table in _rewritable(work, tables)
        for column in table.columns
        if column.name not in (*table.key, "uid") and not column.large and CASTS.get(column.kind.sql)
    ]
    if not found:
        return []
    table, column = work.rng.choice(found)
    kind = work.rng.choice(CASTS[column.kind.sql])
    name = quoted(column.name)
    cursor.execute(f"alter table {table.sql} alter {name} type {kind.sql}")
    tables[table.oid] = table.with_column(column.name, replace(column, kind=kind))
    texts = dict(cursor.all(f"select uid::text, {name}::text from {table.sql}"))
    return [{"table": table.oid, "retype": column.name, "texts": texts}]


def rename_table(work: Workload, cursor: Cursor, tables: Tables) -> Facts:
    table = work.rng.choice(list(tables.values()))
    new = replace(table, name=work.new_table().name + " renamed")
    cursor.execute(f"alter table {table.sql} rename to {quoted(new.name)}")
    tables[table.oid] = new
    return [{"table": table.oid, "call": new.name}]


def drop_table(work: Workload, cursor: Cursor, tables: Tables) -> Facts:
    """Drop a table and create another, half of the time with the same name."""
    found = [table for table in tables.values() if not work.for_lakes or _is_left_alone(cursor, table)]
    if not found or not work.may_drop():
        return []
    table = work.rng.choice(found)
    cursor.execute(f"drop table {table.sql}")
    del tables[table.oid]
    new = work.new_table()
    if work.rng.random() < 0.5 and not table.partitioned:
        new = replace(new, name=table.name)
    made = work.create(cursor, new)
    tables[made.oid] = made
    if cursor.all("select from pg_publication where pubname = %s", [work.publication]):
        cursor.execute(f"alter publication {quoted(work.publication)} add table {made.sql}")
    return [{"table": table.oid, "gone": table.name}]


def add_enum_value(work: Workload, cursor: Cursor, tables: Tables) -> Facts:
    # The value can't be used before the commit: `Table` of later transactions does not list it either.
    cursor.execute(f"alter type mood add value 'm{work.rng.getrandbits(40)}'")
    return []


def change_identity(work: Workload, cursor: Cursor, tables: Tables) -> Facts:
    found = [
        table
        for table in tables.values()
        if table.key and not table.deferrable and not table.partitioned and table.identity in "df"
    ]
    if not found:
        return []
    table = work.rng.choice(found)
    identity = "f" if table.identity == "d" else "d"
    cursor.execute(f"alter table {table.sql} replica identity {'full' if identity == 'f' else 'default'}")
    tables[table.oid] = replace(table, identity=identity)
    return [{"table": table.oid, "identity": identity}]


def change_key(work: Workload, cursor: Cursor, tables: Tables) -> Facts:
    """Make `uid` the key, add it to the key, or remove it from the key."""
    found = [
        table
        for table in tables.values()
        if table.key and not table.deferrable and not table.partitioned and table.identity in "df"
    ]
    if not found:
        return []
    table = work.rng.choice(found)
    key = work.rng.choice([key for key in (("uid",), (*table.key, "uid")) if len(set(key)) == len(key)])
    constraint = cursor.one(
        "select conname from pg_constraint where conrelid = %s::oid and contype = 'p'", [table.oid]
    )
    listed = ", ".join(map(quoted, key))
    cursor.execute(
        f"alter table {table.sql} drop constraint {quoted(constraint)}, add primary key ({listed})"
    )
    columns = tuple(
        replace(column, required=column.required or column.name in key) for column in table.columns
    )
    tables[table.oid] = replace(table, key=key, columns=columns)
    return [{"table": table.oid, "key": list(key)}]


DDL: dict[str, Alter] = {
    act.__name__: act
    for act in (
        add_column, add_column_with_default, drop_column, rename_column, widen_column, rename_table,
        drop_table, add_enum_value, change_identity, change_key,
    )
}  # fmt: skip

#: Weights for lakes, which follow changes of rows but stop at a renamed table.
LAKE_DDL: dict[str, Alter] = {
    **{name: act for name, act in DDL.items() if act is not rename_table},
    **{act.__name__: act for act in (swap_columns, retype_column)},
}

_TEXT, _DECIMAL, _SHORTER = BY_SQL["varchar(12)"], BY_SQL["numeric(12,2)"], BY_SQL["numeric(30,10)"]

#: Type changes that a mirror follows exactly although the texts change.
CASTS: dict[str, tuple[Kind, ...]] = {
    "smallint": (BY_SQL["numeric"], Kind("numeric(14,3)", _DECIMAL.make), BY_SQL["double precision"]),
    "integer": (Kind("smallint", BY_SQL["smallint"].make), Kind("numeric(14,3)", _DECIMAL.make), _TEXT),
    "bigint": (BY_SQL["integer"], Kind("numeric(20,1)", _DECIMAL.make)),
    "numeric(12,2)": (Kind("numeric(12,1)", _DECIMAL.make), Kind("numeric(14,4)", _DECIMAL.make)),
    "numeric(30,10)": (Kind("numeric(30,4)", _SHORTER.make), BY_SQL["bigint"]),
    "real": (BY_SQL["double precision"],),
    "double precision": (BY_SQL["real"],),
    "char(12)": (BY_SQL["varchar(12)"], Kind("text", _TEXT.make)),
    "mood": (Kind("text", BY_SQL["mood"].make),),
    "jsonb": (Kind("text", BY_SQL["jsonb"].make),),
    "uuid": (Kind("varchar(40)", BY_SQL["uuid"].make),),
    "date": (BY_SQL["timestamp"],),
    "posint": (BY_SQL["integer"],),
    "code": (Kind("text", _TEXT.make),),
}


def _rewritable(work: Workload, tables: Tables) -> list[Table]:
    """Return the tables that PostgreSQL may rewrite.

    A rewrite loses the default that older rows have for an added column, and a lake can get it from
    nowhere else: see "Limits" in the docs of schema changes.
    """
    return [
        table
        for table in tables.values()
        if not work.for_lakes or not any(column.filled for column in table.columns)
    ]


def _fresh(work: Workload, table: Table) -> str:
    name = f"n{work.rng.getrandbits(24)}"
    assert name not in table.names
    return name if work.for_lakes else work.rng.choice((name, f"N {name}", f'"{name}'))


def _is_left_alone(cursor: Cursor, table: Table) -> bool:
    """Tell whether this transaction has not changed any row of the table.

    Once a table is dropped, the catalogue says nothing about it when capture reads those rows.
    """
    return not cursor.all(
        "select from pg_locks where pid = pg_backend_pid() and relation = %s::oid"
        " and mode in ('RowExclusiveLock', 'AccessExclusiveLock')",
        [table.oid],
    )
