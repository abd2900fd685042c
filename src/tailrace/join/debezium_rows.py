"""Converts Debezium's documents (JSON with or without schemas, or Avro) to rows for the change log. Pure.

A schema has the types of columns; without one each column is text. A table's description is written before
its first change, and again when its columns or their types have changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tailrace.errors import Kind, TailraceError
from tailrace.join.debezium_values import Placeholder, Writer, column_type
from tailrace.protocol.facts import Facts
from tailrace.protocol.frames import control_json
from tailrace.sources.row_frames import UNCHANGED, ColumnShape, Row, RowFrames, TableShape

#: Name of the state in the log with the highest column number of each table.
TABLES = "tables"

#: A document's column: its name, and its type's schema, if there is one.
_Field = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Deleted:
    """A delete that is not written yet, with the document's `source`: it may be the first part of an update
    that changed the key, to whose second part it gives the former key.
    """

    source: Mapping[str, Any]
    shape: TableShape
    row: Row


@dataclass(slots=True)
class _Table:
    shape: TableShape
    highest: int  # the highest number that a column has had
    key: tuple[str, ...] = ()  # the message's, from which the shape's is
    fields: Sequence[_Field] = ()
    writers: Sequence[tuple[str, Writer, Mapping[str, Any]]] = ()


def json_document(message: bytes) -> tuple[Mapping[str, Any], Any]:
    """Return a message's schema, empty if it has none, and its payload.

    :raises ValueError: the message is not JSON.
    """
    document = json.loads(message)
    # A key may have a column with one of these names.
    if isinstance(document, dict) and document.keys() == {"schema", "payload"}:
        return document["schema"] or {}, document["payload"]
    return {}, document


class DebeziumTables:
    """The tables of the documents, as the log describes them.

    :param in_force: the schema frames in force in the log, by key.
    :param placeholder: the text that a document has for a value that was not sent.
    :param document: returns a message's schema and payload, as `json_document`.
    """

    def __init__(
        self,
        in_force: Mapping[str, bytes],
        placeholder: str,
        document: Callable[[bytes], tuple[Mapping[str, Any], Any]] = json_document,
    ) -> None:
        self._document = document
        self._placeholder = Placeholder(placeholder)
        self._tables: dict[tuple[str, str], _Table] = {}
        highest: dict[str, int] = {}
        if (state := in_force.get(f"S{TABLES}")) is not None:
            highest = control_json(state)["state"]
        for key, frame in in_force.items():
            if key.startswith("F"):
                facts = Facts.from_json(control_json(frame))
                shape = TableShape.of(facts)
                number = max([highest.get(str(facts.relation), 0), *(each.number for each in shape.columns)])
                self._tables[facts.schema, facts.table] = _Table(shape, number)
        self._is_new = False
        self._deleted: _Deleted | None = None

    def state(self) -> dict[str, int] | None:
        """Return the state `TABLES` if it has changed since the last call; otherwise None."""
        if not self._is_new:
            return None
        self._is_new = False
        return {str(table.shape.relation): table.highest for table in self._tables.values()}

    def write(self, frames: RowFrames, key: bytes | None, value: bytes, *, rows: bool = False) -> None:
        """Write a change within a transaction, or, with `rows`, within a snapshot.

        A delete is written with the next change, or by `write_rest`.
        :raises TailraceError: `DECODE_FAILED`.
        """
        try:
            schema, event = self._document(value)
            source = event["source"]
            name = str(source.get("schema") or source.get("db") or "public"), str(source["table"])
            op = event["op"]
            image = event.get("after") if op != "d" else event.get("before")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise _undecodable("it is no change as Debezium writes it") from None
        if rows and op in ("d", "t"):
            raise _undecodable(
                f"a change {op!r} of {name[0]}.{name[1]} names no transaction; "
                "provide.transaction.metadata was off"
            )
        lacks = (
            op == "c" and isinstance(image, dict) and any(map(self._placeholder.stands_for, image.values()))
        )
        if not lacks:
            self.write_rest(frames)
        if op == "t":
            if (known := self._tables.get(name)) is not None:
                frames.truncate(known.shape)
            return
        if op not in _OPS:
            return
        if not isinstance(image, dict):
            raise _undecodable(f"a change {op!r} of {name[0]}.{name[1]} has no row")
        fields = _fields(schema, "after" if op != "d" else "before", image)
        key_names = self._key_names(key)
        table = self._described(frames, name, fields, key_names, of_delete=op == "d", rows=rows)
        try:
            self._change(frames, table, op, event, image, rows=rows)
        except TailraceError:
            raise
        except (ValueError, KeyError, TypeError, OverflowError, ArithmeticError):
            raise _undecodable(f"a value of {name[0]}.{name[1]} is not of its column's type") from None

    def _change(
        self,
        frames: RowFrames,
        table: _Table,
        op: str,
        event: Mapping[str, Any],
        image: Mapping[str, Any],
        *,
        rows: bool,
    ) -> None:
        shape, row = table.shape, self._row(table, image)
        if rows:
            if UNCHANGED in row:
                raise _undecodable(
                    f"a change {op!r} of {shape.schema}.{shape.table} that lacks an unchanged value names no "
                    "transaction; provide.transaction.metadata was off"
                )
            frames.rows(shape, [row])
        elif op == "u":
            frames.update(shape, row, None if shape.key else self._old(table, event))
        elif op == "d":
            self._deleted = _Deleted(event["source"], shape, row)
        elif UNCHANGED in row:
            frames.update(shape, row, self._former(shape, event))
        else:
            frames.insert(shape, row)

    def write_rest(self, frames: RowFrames) -> None:
        """Write the delete that was last, if it is not written; before the end of a transaction."""
        if (deleted := self._deleted) is not None:
            self._deleted = None
            frames.delete(deleted.shape, deleted.row)

    def _former(self, shape: TableShape, event: Mapping[str, Any]) -> Row:
        """Return the deleted row of which a create that lacks values is the new state."""
        deleted, self._deleted = self._deleted, None
        if deleted is None or deleted.source != event["source"]:
            raise _undecodable(
                f"a create of {shape.schema}.{shape.table} lacks an unchanged value, and the delete of its "
                "former key is not before it"
            )
        values = {column.name: text for column, text in zip(deleted.shape.columns, deleted.row, strict=True)}
        return [values.get(column.name) for column in shape.columns]

    def _old(self, table: _Table, event: Mapping[str, Any]) -> Row:
        if not isinstance(event.get("before"), dict):
            raise _undecodable(
                f"an update of {table.shape.schema}.{table.shape.table}, which has no key, lacks the old row"
            )
        return self._row(table, event["before"])

    def _row(self, table: _Table, image: Mapping[str, Any]) -> Row:
        return [
            None
            if (value := image.get(name)) is None
            else UNCHANGED
            if self._placeholder.stands_for(value)
            else write(value, schema)
            for name, write, schema in table.writers
        ]

    def _key_names(self, key: bytes | None) -> tuple[str, ...]:
        if key is None:
            return ()
        try:
            _, members = self._document(key)
        except ValueError:
            members = None
        if not isinstance(members, dict):
            raise _undecodable("its key is no object, in the form of the values")
        return tuple(members)

    def _described(
        self,
        frames: RowFrames,
        name: tuple[str, str],
        fields: Sequence[_Field],
        key: tuple[str, ...],
        *,
        of_delete: bool,
        rows: bool,
    ) -> _Table:
        """Return the table for a row with `fields`; write its description if it has changed.

        A delete may have only the key, and `rows` come from partitions that are read independently, possibly
        after a later change of the table: neither removes a column or changes the key.
        """
        table = self._tables.get(name)
        keeps = of_delete or rows
        if table is not None and table.fields == fields and (keeps or table.key == key):
            return table
        sent = dict(fields)
        known = () if table is None else table.shape.columns
        names = [column for column, _ in fields]
        if known and keeps:
            added = [] if of_delete else [each for each in names if all(each != one.name for one in known)]
            names = [*(column.name for column in known), *added]
        columns, highest = _numbered(names, sent, known, 0 if table is None else table.highest)
        writers = [(column, column_type(sent.get(column, {}))[1], sent.get(column, {})) for column in names]
        if table is not None and of_delete:
            return replace(table, writers=writers)
        if table is not None and rows:
            key, own = table.key, table.shape.key
        else:
            own = tuple(column for column in key if column in names)
        if table is None:
            relation = 1 + max((each.shape.relation for each in self._tables.values()), default=0)
            shape = TableShape(relation, *name, columns, own)
        else:
            shape = replace(table.shape, columns=columns, key=own)
        if table is None or shape != table.shape:
            shape = shape if table is None else replace(shape, version=shape.version + 1)
            frames.describe(shape)
            self._is_new = True
        # The fields of a row that lacks columns do not describe the table.
        is_whole = len(names) == len(fields)
        found = _Table(shape, highest, key, fields if is_whole else (), writers)
        self._tables[name] = found
        return found


def _numbered(
    names: Sequence[str], sent: Mapping[str, Mapping[str, Any]], known: Sequence[ColumnShape], highest: int
) -> tuple[tuple[ColumnShape, ...], int]:
    """Return columns with these names, and the highest number that a column has had."""
    before = {column.name: column for column in known}
    columns = []
    for name in names:
        if name in before and name not in sent:
            columns.append(before[name])
            continue
        if name not in before:
            highest += 1
        number = before[name].number if name in before else highest
        kind = column_type(sent[name])[0]
        columns.append(ColumnShape(name, kind, number, declared=kind))
    return tuple(columns), highest


_OPS = ("c", "r", "u", "d")


def _fields(schema: Mapping[str, Any], image: str, row: Mapping[str, Any]) -> Sequence[_Field]:
    for member in schema.get("fields", ()):
        if member.get("field") == image:
            return [(field["field"], field) for field in member.get("fields", ())]
    return [(name, {}) for name in row]


def _undecodable(found: str) -> TailraceError:
    return TailraceError(
        Kind.DECODE_FAILED,
        f"take a message into the change log: {found}",
        "see that the data topics hold Debezium's changes, with their whole rows, in JSON, or in Avro with "
        "`registry`",
    )
