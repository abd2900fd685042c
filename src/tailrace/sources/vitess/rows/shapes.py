"""The mapping of a shard's tables to those of the log, as the arrays of numbers that the kernel reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from tailrace.protocol.frames import Bytes, Numbers
from tailrace.sources.row_frames import TableShape
from tailrace.sources.vitess.rows import charsets, kernel, layout
from tailrace.sources.vitess.rows.charsets import Points
from tailrace.sources.vitess.rows.types import ColumnPlan
from tailrace.sources.vitess.rows.values import room_of

#: Number of tables and columns for which the arrays have room before they grow.
_ROOM = 16


@dataclass(slots=True)
class _Described:
    """A table that the shard's stream described, and its shape in the log; None: it is left out."""

    number: int
    table: str
    columns: tuple[ColumnPlan, ...]
    shape: TableShape | None = None


class ShardShapes:
    """The tables that a shard's stream has described.

    :param constants: by name, the texts that added columns have in every row.
    """

    def __init__(self, constants: Mapping[str, str] | None = None) -> None:
        self._constants = constants or {}
        self._described: dict[bytes, _Described] = {}
        self._by_number: list[_Described] = []
        self._charsets: dict[str, int] = {}
        self._texts = bytearray()
        self.tables = np.zeros((_ROOM, layout.TABLE_FIELDS), np.int64)
        self.sources = np.zeros((_ROOM, layout.SOURCE_FIELDS), np.int64)
        self.targets = np.zeros((_ROOM, layout.TARGET_FIELDS), np.int64)
        self._source_count = self._target_count = 0
        self.slots: Numbers = np.full(2 * _ROOM, -1, np.int64)
        self.points: Points = np.zeros(1, np.int32)
        self.texts: Bytes = np.zeros(0, np.uint8)

    def leave_out(self, name: bytes) -> None:
        """Skip the rows of the table with this name."""
        self._put(name, "", (), None)

    def put(self, name: bytes, columns: tuple[ColumnPlan, ...], shape: TableShape) -> None:
        """Map the rows of the table with this name, which have these columns, to a table of the log."""
        self._put(name, shape.table, columns, shape)

    def take(self, shape_of: Callable[[str], TableShape]) -> None:
        """Use the tables' current shapes in the log.

        :param shape_of: given a table's name, returns its shape in the log.
        """
        for name, found in self._described.items():
            if found.shape is not None and (shape := shape_of(found.table)) != found.shape:
                self._put(name, found.table, found.columns, shape)

    def where(self, table: int, column: int) -> tuple[str, str]:
        """Return the names of a table and its column by the kernel's numbers; empty if there is none."""
        if not 0 <= table < len(self._by_number):
            return "", ""
        found = self._by_number[table]
        return found.table, found.columns[column].name if 0 <= column < len(found.columns) else ""

    def columns(self, table: int) -> tuple[ColumnPlan, ...]:
        """Return the columns of a table by the kernel's number."""
        return self._by_number[table].columns

    def _put(
        self, name: bytes, table: str, columns: tuple[ColumnPlan, ...], shape: TableShape | None
    ) -> None:
        found = self._described.get(name)
        if found is None:
            found = self._described[name] = _Described(len(self._by_number), table, columns)
            self._by_number.append(found)
            self.tables = _with_room(self.tables, len(self._by_number))
            row = self.tables[found.number]
            row[layout.NAME_AT], row[layout.NAME_END] = self._text(name)
            self._index()
        found.columns = columns
        found.shape = shape
        row = self.tables[found.number]
        row[layout.RELATION] = 0 if shape is None else shape.relation
        if shape is not None:
            self._put_columns(row, columns, shape)
        self.texts = np.frombuffer(bytes(self._texts), np.uint8)

    def _put_columns(self, row: Numbers, columns: tuple[ColumnPlan, ...], shape: TableShape) -> None:
        # The table's earlier rows in the arrays are not reused: tables rarely change their shape.
        first, target = self._source_count, self._target_count
        self._source_count += len(columns)
        self._target_count += len(shape.columns)
        self.sources = _with_room(self.sources, self._source_count)
        self.targets = _with_room(self.targets, self._target_count)
        places = {}
        room = 0
        for place, column in enumerate(columns):
            parameter = self._table_of(column.charset) if column.charset else column.parameter
            source = self.sources[first + place]
            source[layout.CODE], source[layout.PARAMETER] = column.code, parameter
            source[layout.IS_JSON], source[layout.MAY_LACK] = column.is_json, column.may_lack
            places[column.name] = place
            room += room_of(column.code, column.parameter)
        for place, kept in enumerate(shape.columns, target):
            constant = self._constants.get(kept.name)
            text = kept.missing if constant is None else constant
            missing = b"" if text is None else text.encode()
            begin, end = self._text(missing)
            self.targets[place] = (
                places.get(kept.name, -1) if constant is None else layout.CONSTANT,
                kept.name in shape.key,
                begin,
                layout.NULL_SIZE if text is None else end - begin,
            )
            room += room_of(0, 0) + len(missing)
        row[layout.SOURCES], row[layout.FIRST_SOURCE] = len(columns), first
        row[layout.TARGETS], row[layout.FIRST_TARGET] = len(shape.columns), target
        row[layout.IS_FULL], row[layout.ROOM] = not shape.key, room

    def _table_of(self, charset: str) -> int:
        if charset not in self._charsets:
            self._charsets[charset] = len(self.points)
            self.points = np.concatenate((self.points, charsets.points(charset)))
        return self._charsets[charset]

    def _text(self, text: bytes) -> tuple[int, int]:
        begin = len(self._texts)
        self._texts += text
        return begin, len(self._texts)

    def _index(self) -> None:
        # The kernel's hash table of names; at least half of its slots are free.
        texts = np.frombuffer(bytes(self._texts), np.uint8)
        count = len(self._by_number)
        added = range(count - 1, count)
        if 2 * count > len(self.slots):
            self.slots = np.full(2 * len(self.slots), -1, np.int64)
            added = range(count)
        for number in added:
            at, end = self.tables[number, layout.NAME_AT], self.tables[number, layout.NAME_END]
            slot = kernel.name_hash(texts, at, end) & (len(self.slots) - 1)
            while self.slots[slot] >= 0:
                slot = (slot + 1) & (len(self.slots) - 1)
            self.slots[slot] = number


def _with_room(array: Numbers, count: int) -> Numbers:
    if count <= len(array):
        return array
    grown = np.zeros((max(count, 2 * len(array)), array.shape[1]), np.int64)
    grown[: len(array)] = array
    return grown
