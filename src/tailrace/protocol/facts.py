"""Facts about one version of a table: catalogue data that a Relation message does not have.

The log has them, as the JSON of a facts frame, before the Relation message that they belong to.
A column's `number` (`pg_attribute.attnum`) doesn't change when it is renamed, and a new column
with an old name has another one: it distinguishes a rename from a drop and an addition.

Pure. Fields that logs of older versions of Tailrace lack are read as unknown.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Self

from tailrace.errors import REPORT_LOG, Kind, TailraceError


@dataclass(frozen=True, slots=True)
class ColumnFacts:
    """One column that the server sends, in the order of the Relation message.

    `missing`: the column's value, as text, in rows older than the column, if PostgreSQL added it with a
    default and wrote no row. `unknown`: older rows were written with values that were not sent (a default
    such as `random()`, a sequence), or may have another column's values, because it is not known which column
    this was. `may_be_key`: it belongs to a primary key that was added before or after the rows that follow,
    which is not known. `types` describes, by oid, the column's type and the types under it that are not built
    in: for a domain its `base` and `modifier`, for an array its `item` and `delimiter`, recursively; for
    every type its `name`; for all others their `kind` (`pg_type.typtype`) and `parts` (for an enumeration its
    labels by oid, for a composite its attributes' types by number).
    """

    name: str
    number: int = 0  # 0: not known
    type: str = ""  # as in SQL, for messages
    type_oid: int = 0
    type_modifier: int = -1
    base_oid: int = 0  # for a domain, the type under it; else the type itself
    base_modifier: int = -1
    not_null: bool = False
    missing: str | None = None
    unknown: bool = False
    may_be_key: bool = False
    types: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a table from a Relation message on.

    `version` numbers the shapes that the log has had under the table's name, from 1; 0: not known.
    `filenode` changes when PostgreSQL rewrites all rows. `replaced` is the relation that had the name before,
    if another one, and `replaced_name` that relation's name at this time, if it still exists. `read_from`: a
    snapshot has read the whole table, and each of its rows was read or changed at this log offset or later;
    0: not known. `pending`: the transaction whose facts are not known yet; 0: none. `numbered`: the highest
    number that a column of the table has ever had, if the source's catalogue has no numbers; 0: not known.
    `left_out`: columns that the source sends and that the settings exclude from the log.
    """

    relation: int
    schema: str
    table: str
    primary_key: tuple[str, ...]
    columns: tuple[ColumnFacts, ...] = ()
    version: int = 0
    filenode: int = 0
    replaced: int = 0
    replaced_name: tuple[str, str] | None = None
    read_from: int = 0
    pending: int = 0
    numbered: int = 0
    left_out: tuple[str, ...] = ()

    @property
    def qualified_name(self) -> str:
        return f"{self.schema}.{self.table}"

    def column(self, number: int) -> ColumnFacts | None:
        """Return the column of this number; None if there is none, or `number` is 0."""
        return next((column for column in self.columns if number and column.number == number), None)

    def as_json(self) -> dict[str, Any]:
        """Return the object that `from_json` reads; equal facts give equal JSON."""
        defaults = asdict(ColumnFacts(""))
        columns = [
            {
                name: value
                for name, value in asdict(column).items()
                if name in _ALWAYS or value != defaults[name]
            }
            for column in self.columns
        ]
        where_told = {
            "replaced": self.replaced,
            "replaced_name": list(self.replaced_name or ()),
            "read_from": self.read_from,
            "pending": self.pending,
            "numbered": self.numbered,
            "left_out": list(self.left_out),
        }
        return {
            "relation": self.relation,
            "schema": self.schema,
            "table": self.table,
            "version": self.version,
            "filenode": self.filenode,
            "primary_key": list(self.primary_key),
            "columns": columns,
            **{name: value for name, value in where_told.items() if value},
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """Return the facts in a facts frame's JSON.

        :raises TailraceError: `PROTOCOL_VIOLATION` if it is malformed.
        """
        key = content.get("primary_key") or []
        columns = content.get("columns") or []
        replaced_name = content.get("replaced_name")
        left_out = content.get("left_out") or []
        if not _are(key, str) or not _are(columns, dict) or not _are(left_out, str):
            raise _violation("its primary key or columns are not lists of the right type")
        try:
            return cls(
                relation=int(content["relation"]),
                schema=str(content.get("schema", "")),
                table=str(content.get("table", "")),
                primary_key=tuple(key),
                columns=tuple(_column(each) for each in columns),
                version=int(content.get("version", 0)),
                filenode=int(content.get("filenode", 0)),
                replaced=int(content.get("replaced", 0)),
                replaced_name=None if replaced_name is None else (replaced_name[0], replaced_name[1]),
                read_from=int(content.get("read_from", 0)),
                pending=int(content.get("pending", 0)),
                numbered=int(content.get("numbered", 0)),
                left_out=tuple(left_out),
            )
        except (KeyError, TypeError, ValueError, IndexError, OverflowError):
            raise _violation("a number or name is missing") from None


_ALWAYS = ("name", "number", "type", "type_oid", "base_oid", "base_modifier", "not_null")
_FIELDS = {field: type(value) for field, value in asdict(ColumnFacts("")).items()}


def _column(content: dict[str, Any]) -> ColumnFacts:
    known = {name: value for name, value in content.items() if name in _FIELDS}
    for name, value in known.items():
        if name != "missing" and not isinstance(value, _FIELDS[name]):
            raise _violation(f"a column's {name} has the wrong type")
    return ColumnFacts(**known)


def _are(values: object, kind: type) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def _violation(found: str) -> TailraceError:
    return TailraceError(Kind.PROTOCOL_VIOLATION, f"read a table's facts: {found}", REPORT_LOG)


def differences(before: Facts, after: Facts) -> list[str]:
    """Return descriptions of the changes from one version of a table to the next, in a fixed order."""
    found = []
    if before.qualified_name != after.qualified_name:
        found.append(f"renamed from {before.qualified_name}")
    if before.relation != after.relation:
        return [*found, "created again"]
    old_names = {column.name: column for column in before.columns}
    kept: set[str] = set()
    for column in after.columns:
        old = before.column(column.number) if column.number else old_names.get(column.name)
        if old is None:
            found.append(f"column {column.name} added ({column.type})")
            continue
        kept.add(old.name)
        if old.name != column.name:
            found.append(f"column {old.name} renamed to {column.name}")
        if (old.type_oid, old.type_modifier) != (column.type_oid, column.type_modifier):
            found.append(f"column {column.name}: {old.type} to {column.type}")
        elif _parts(old) != _parts(column):
            found.append(f"column {column.name}: labels or attributes of its type changed")
        if old.not_null != column.not_null:
            found.append(f"column {column.name}: {'not null' if column.not_null else 'nullable'}")
    found += [f"column {column.name} dropped" for column in before.columns if column.name not in kept]
    if before.primary_key != after.primary_key:
        found.append(f"primary key ({', '.join(before.primary_key)}) to ({', '.join(after.primary_key)})")
    return found


def _parts(column: ColumnFacts) -> list[tuple[str, Any]]:
    return [(oid, of["parts"]) for oid, of in sorted(column.types.items()) if of.get("parts")]
