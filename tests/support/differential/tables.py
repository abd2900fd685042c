"""Random tables, and the SQL that creates them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from tests.support.differential import kinds
from tests.support.differential.kinds import Kind

#: A column of each table: a number that no two rows ever have, so that the key can be changed to it.
SERIAL = Kind("bigint", lambda rng: str(rng.getrandbits(62)))


@dataclass(frozen=True, slots=True)
class Column:
    """A column as the workload knows it.

    :ivar required: NOT NULL.
    :ivar large: stored out of line where a value is long.
    :ivar filled: added with a default, so older rows have that.
    """

    name: str
    kind: Kind
    required: bool = False
    large: bool = False
    filled: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table as the workload knows it at one moment.

    :ivar key: columns of the primary key; empty: none.
    :ivar identity: of `pg_class.relreplident`: d, f, i (an index on `uid`) or n.
    :ivar deferrable: whether the primary key is checked at the commit only.
    :ivar partitioned: by the hash of the key's first column.
    """

    oid: int
    schema: str
    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    identity: str = "d"
    deferrable: bool = False
    partitioned: bool = False

    @property
    def sql(self) -> str:
        return f"{quoted(self.schema)}.{quoted(self.name)}"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    @property
    def is_updatable(self) -> bool:
        """Whether the server accepts updates and deletes of a published table."""
        return self.identity in "fi" or (self.identity == "d" and bool(self.key) and not self.deferrable)

    def column(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    def with_column(self, name: str, column: Column | None) -> Table:
        """Return the table with a column replaced, or without it."""
        kept = [column if each.name == name else each for each in self.columns]
        key = tuple(column.name if column and each == name else each for each in self.key)
        return replace(self, columns=tuple(each for each in kept if each is not None), key=key)


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def random_table(rng: random.Random, number: int, *, for_lakes: bool) -> Table:
    """Return a table that is not created yet and has no oid.

    :param for_lakes: use only names that a lake can hold, and give each row an identity.
    """
    name = f"t{number}" if for_lakes else rng.choice((f"t{number}", f'Odd "{number}". é', f"T{number} x"))
    columns = [Column("uid", SERIAL, required=True)]
    key: list[str] = []
    shape = rng.choices(("key", "keyless", "insert_only"), (8, 2, 0 if for_lakes else 1))[0]
    if shape == "key":
        parts = [rng.choice(kinds.KEYS)]
        parts += rng.sample(kinds.KEY_PARTS, rng.choice((0, 0, 1, 2)))
        key = [f"k{at}" for at in range(len(parts))]
        columns += [Column(each, kind, required=True) for each, kind in zip(key, parts, strict=True)]
    for at in range(rng.randint(1, 9)):
        if rng.random() < 0.25:
            columns.append(Column(f"big{at}", rng.choice(kinds.LARGE), large=True))
        else:
            column = f"c{at}" if for_lakes else rng.choice((f"c{at}", f"C {at}", f'q"{at}', f"é\\{at}'"))
            columns.append(Column(column, rng.choice(kinds.SMALL)))
    rng.shuffle(columns)
    identity, deferrable = "d", False
    if shape == "keyless":
        identity = "f"
    elif shape == "key":
        deferrable = rng.random() < 0.2
        identity = "f" if deferrable else rng.choices("dfi", (6, 2, 1))[0]
    partitioned = shape == "key" and not deferrable and identity != "i" and rng.random() < 0.15
    return Table(
        0, "public", name, tuple(columns), tuple(key), identity, deferrable, partitioned,
    )  # fmt: skip


def create_statements(table: Table) -> list[str]:
    """Return the SQL that makes the table, its partitions and its replica identity."""
    columns = [
        f"{quoted(each.name)} {each.kind.sql}{' not null' if each.required else ''}" for each in table.columns
    ]
    if table.key:
        deferred = " deferrable initially deferred" if table.deferrable else ""
        columns.append(f"primary key ({', '.join(map(quoted, table.key))}){deferred}")
    parts = f" partition by hash ({quoted(table.key[0])})" if table.partitioned else ""
    made = [f"create table {table.sql} ({', '.join(columns)}){parts}"]
    leaves = [table.sql]
    if table.partitioned:
        leaves = [f"{quoted(table.schema)}.{quoted(f'{table.name}_{at}')}" for at in range(3)]
        made += [
            f"create table {leaf} partition of {table.sql} for values with (modulus 3, remainder {at})"
            for at, leaf in enumerate(leaves)
        ]
    for leaf in leaves:
        made += [
            # VACUUM would run at moments that the workload does not control.
            f"alter table {leaf} set (autovacuum_enabled = false, toast.autovacuum_enabled = false)",
        ]
        made += [
            f"alter table {leaf} alter {quoted(each.name)} set storage external"
            for each in table.columns
            if each.large
        ]
    if table.identity == "i":
        made += [f"create unique index {quoted(f'{table.name} uid')} on {table.sql} (uid)"]
        made += [f"alter table {table.sql} replica identity using index {quoted(f'{table.name} uid')}"]
    elif table.identity == "f":
        made += [f"alter table {leaf} replica identity full" for leaf in dict.fromkeys((table.sql, *leaves))]
    return made
