"""Decoding of a block of the log into changes, table by table: the entry point of decoding.

Everything here is a pure function of the block, the unit open at its start and the schema frames in
force there: the same arguments always give the same changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pyarrow as pa

from tailrace.decode import kernel
from tailrace.decode.column_policy import EVERYTHING, Shape, TablePolicy
from tailrace.decode.computed import ComputedColumns
from tailrace.decode.envelope import envelope
from tailrace.decode.gather import NOT_UTF8, Cells, gather_bytes, text_buffers
from tailrace.decode.images import image, image_column, images, source_of
from tailrace.decode.json.debezium import SourceInfo, json_lines
from tailrace.decode.rows import old_key_texts, old_keys, old_rows, typed_rows
from tailrace.decode.schemas import Catalog
from tailrace.decode.shards import BlockShards, ShardPositions
from tailrace.decode.tuples import EMPTY_CELLS_MAX, Tuples, find_tuples, in_utf8
from tailrace.decode.types import as_text
from tailrace.errors import REPORT_LOG, Kind, TailraceError
from tailrace.model import OWN_FORMS, Op, Relation, ValueModes
from tailrace.protocol import frames
from tailrace.protocol.frames import Bytes, Numbers, OpenUnit

#: Largest block, in bytes: places in it are 32-bit numbers. Capture refuses frames near this size.
BLOCK_BYTES_MAX = 2**31 - 1


_Made = TypeVar("_Made")

#: A way in which a table differs from what the log contains.
View = Shape | ComputedColumns | Relation


class TableChanges:
    """Changes of one version of a table in log order, or logical messages (no relation).

    `relation` is the table as consumers see it: with a `Shape`, without some columns, masked, keyed.
    Values are decoded on request only. The arrays have one entry per change; `op` has the codes of
    `model.Op`'s letters, `xid` and `commit_time_us` are `kernel.NONE` if the change has none.
    """

    def __init__(
        self,
        relation: Relation | None,
        raw: Bytes,
        fields: Numbers,
        views: tuple[View, ...] = (),
        shards: BlockShards | ShardPositions | None = None,
    ) -> None:
        # Shapes, computed columns and renamed columns, applied one after the other.
        last = views[-1] if views else relation
        self._relation = last.relation if isinstance(last, Shape | ComputedColumns) else last
        self._held = relation
        self._views = views
        self._raw = raw
        self._fields = fields
        self._shards = shards
        self._found: Tuples | None = None
        self._is_utf8 = False  # whether `_found` is known to be

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        name = self._relation.qualified_name if self._relation else "messages"
        return f"<TableChanges of {name}: {self.count}>"

    def __reduce__(self) -> tuple[type[TableChanges], tuple[object, ...]]:
        raw, fields = _packed(self._raw, self._fields)
        shards = self.shards
        if shards is not None:
            places = shards.places(np.unique(self.commit_lsn))
            shards = shards.take(places[places >= 0])
        return TableChanges, (self._held, raw, fields, self._views, shards)

    @property
    def relation(self) -> Relation | None:
        return self._relation

    @property
    def count(self) -> int:
        return int(self._fields.shape[1])

    @property
    def op(self) -> Bytes:
        return self._field(kernel.OP).astype(np.uint8)

    @property
    def size_bytes(self) -> int:
        """Approximate size of these changes in the log, in bytes: what decoding them reads."""
        sent = self._fields[kernel.END] - self._fields[kernel.AT]
        return int(sent.sum())

    @property
    def lsn(self) -> Numbers:
        return self._field(kernel.LSN)

    @property
    def commit_lsn(self) -> Numbers:
        return self._field(kernel.AT_COMMIT_LSN)

    @property
    def commit_time_us(self) -> Numbers:
        return self._field(kernel.AT_COMMIT_TIME)

    @property
    def xid(self) -> Numbers:
        return self._field(kernel.AT_XID)

    @property
    def ordinal(self) -> Numbers:
        return self._field(kernel.AT_ORDINAL)

    @property
    def log_offset(self) -> Numbers:
        return self._field(kernel.LOG_OFFSET)

    @property
    def shards(self) -> ShardPositions | None:
        """Shard positions of these changes, possibly of others too; None if the source has none."""
        if isinstance(self._shards, BlockShards):
            self._shards = self._shards.positions
        return self._shards if self._shards is not None and len(self._shards) else None

    def slice(self, from_offset: int, to_offset: int) -> TableChanges:
        """Return the changes with log offsets in `[from_offset, to_offset)`."""
        first, last = np.searchsorted(self.log_offset, [from_offset, to_offset])
        return self.part(int(first), int(last))

    def part(self, first: int, last: int) -> TableChanges:
        """Return the changes at the indexes `[first, last)`."""
        if first == 0 and last == self.count:
            return self
        part = self._fields[:, first:last]
        views = tuple(
            view.part(first, last) if isinstance(view, ComputedColumns) else view for view in self._views
        )
        return TableChanges(self._held, self._raw, part, views, self._shards)

    def take(self, places: Numbers) -> TableChanges:
        """Return the changes at the indexes `places` (ascending)."""
        part = np.ascontiguousarray(self._fields[:, places])
        views = tuple(
            view.take(places) if isinstance(view, ComputedColumns) else view for view in self._views
        )
        return TableChanges(self._held, self._raw, part, views, self._shards)

    def named(self, relation: Relation) -> TableChanges:
        """Return the changes with `relation`: this one's `relation`, with other names of columns."""
        if relation == self._relation:
            return self
        return self._viewed(relation)

    def reshaped(self, shape: Shape) -> TableChanges:
        """Return the changes with columns left out or masked; `shape` is made from this `relation`."""
        return self._viewed(shape)

    def with_columns(self, computed: ComputedColumns) -> TableChanges:
        """Return the changes with columns that were computed from them; see `computed`."""
        return self._viewed(computed)

    def _viewed(self, view: View) -> TableChanges:
        views = (*self._views, view)
        return TableChanges(self._held, self._raw, self._fields, views, self._shards)

    def rows(self, as_text: Collection[str] = ()) -> pa.RecordBatch:
        """Return typed rows in `types.row_schema`; columns named in `as_text` have type string and
        PostgreSQL's text.

        A delete has its old key or old row, a truncate no values.
        :raises TailraceError: `DECODE_FAILED` if tuples don't fit the table, a text is not UTF-8,
            a column's name is reserved, or these are messages.
        """
        return self._decoded(lambda tuples: typed_rows(self._table(), tuples, as_text))

    def old_keys(self) -> pa.RecordBatch | None:
        """Return the former keys of updates that changed the key: typed key columns,
        `_log_offset` of the update and `_special`. None if there are none.

        :raises TailraceError: as `rows`.
        """
        return self._decoded(lambda tuples: old_keys(self._table(), tuples))

    def old_key_texts(self) -> pa.MapArray:
        """Return, for each update that changed the key, a map from column to PostgreSQL's text of the
        former key; null for other changes. In a table without a key under `REPLICA IDENTITY FULL`,
        every column belongs to the key.

        :raises TailraceError: as `rows`.
        """
        return self._decoded(lambda tuples: old_key_texts(self._table(), tuples))

    def old_rows(self) -> pa.RecordBatch | None:
        """Return the complete old rows of updates that sent them (`REPLICA IDENTITY FULL`): all
        columns typed, `_log_offset` of the update and `_special`. None if there are none.

        :raises TailraceError: as `rows`.
        """
        return self._decoded(lambda tuples: old_rows(self._table(), tuples))

    def envelope(self, task: str) -> pa.RecordBatch:
        """Return the changes in `envelope.SCHEMA`.

        :raises TailraceError: `DECODE_FAILED` if tuples don't fit the table or a text is not UTF-8.
        """
        return self._decoded(lambda tuples: envelope(tuples, task))

    def images(self) -> pa.RecordBatch:
        """Return the changes with key, row before and row after as structs: `images.NAMES`.

        :raises TailraceError: as `rows`.
        """
        return self._decoded(images)

    def image(self, name: str) -> tuple[pa.Array, pa.MapArray | None]:
        """Return one column of `images` other than `special`, and the entries of `special` about its
        values. Only this column is decoded.

        :raises TailraceError: as `rows`.
        """
        return self._decoded(lambda tuples: image(tuples, name))

    def image_column(self, image: str, name: str) -> pa.Array | None:
        """Return one field of `key`, `before` or `after` of `images`; None if there is no such field.

        :raises TailraceError: as `rows`.
        """
        return self._decoded(lambda tuples: image_column(tuples, image, name))

    def image_texts(self, image: str, name: str) -> pa.StringArray | None:
        """Return what `image_column` returns, with values as the text that the source sent."""

        def texts(tuples: Tuples) -> pa.StringArray | None:
            assert tuples.relation is not None, "messages have no columns"
            return image_column(replace(tuples, relation=as_text(tuples.relation, {name})), image, name)

        return None if self._relation is None else self._decoded(texts)

    def source(self) -> pa.StructArray:
        """Return the column `source` of `images`, without decoding any row."""
        return source_of(self._relation, self._fields, self.shards)

    def json_lines(self, task: str, source: SourceInfo) -> pa.LargeStringArray:
        """Return one JSON document per change in Debezium's payload form, each ending with a newline:
        the array's data buffer can be written to a file as it is.

        :raises TailraceError: `DECODE_FAILED` if tuples don't fit the table or a text is not UTF-8.
        """
        return self._decoded(lambda tuples: json_lines(tuples, task, source))

    def _field(self, row: int) -> Numbers:
        numbers: Numbers = self._fields[row]
        return numbers

    def _table(self) -> Relation:
        if self._relation is None:
            raise TailraceError(
                Kind.DECODE_FAILED,
                "decoded rows: logical messages belong to no table",
                "read them as envelopes or JSON",
            )
        return self._relation

    def tuples(self) -> Tuples:
        """Return the cells of the changes, which the first call finds.

        :raises TailraceError: `DECODE_FAILED` if tuples don't fit the table.
        """
        if self._found is None:
            raw, fields = self._raw, self._fields
            if self._views:  # each appends its texts to a copy of the bytes: not of those of other tables
                raw, fields = _packed(raw, fields)
            found = find_tuples(self._held, raw, fields, self.shards)
            if self._views:
                found = in_utf8(found)  # masks read texts
            for view in self._views:
                found = replace(found, relation=view) if isinstance(view, Relation) else view.apply(found)
            self._found = found
        return self._found

    def tuples_in_utf8(self) -> Tuples:
        """Return the cells of the changes, with texts that are not UTF-8 as `in_utf8` writes them.

        :raises TailraceError: as `tuples`.
        """
        if not self._is_utf8:
            self._found = in_utf8(self.tuples())
            self._is_utf8 = True
        return self.tuples()

    def _decoded(self, decode: Callable[[Tuples], _Made]) -> _Made:
        # Almost no database has texts that are not UTF-8: they are replaced only after one was found.
        try:
            return decode(self.tuples())
        except TailraceError as error:
            if error.message != NOT_UTF8 or self._is_utf8:
                raise
        return decode(self.tuples_in_utf8())


def decode_block(
    raw: Bytes,
    log_offset: int,
    open_at_start: OpenUnit | None,
    schema: Iterable[bytes],
    *,
    tables: frozenset[int] | None = None,
    modes: ValueModes = OWN_FORMS,
    table_policy: TablePolicy = EVERYTHING,
    settled: Mapping[tuple[int, int], bytes] | None = None,
    beyond: ShardPositions | None = None,
) -> list[TableChanges]:
    """Return the changes in complete frames, by table and version of the table.

    :param raw: complete frames; the result refers to them and does not copy them.
    :param log_offset: log offset of the first frame.
    :param open_at_start: the unit that is open at the first frame.
    :param schema: schema frames in force at the first frame, in log order.
    :param tables: oids of the wanted relations, without logical messages; None: everything.
    :param modes: how values are represented.
    :param table_policy: which columns are disclosed, and how they are masked.
    :param settled: see `Catalog`.
    :param beyond: shard position of the unit that is open at the end, if its frame follows these frames.
    :raises TailraceError: `SCHEMA_PENDING` if facts are pending; `PROTOCOL_VIOLATION` if the frames
        are malformed, `SCHEMA_MISSING` if no Relation message describes a table, `CONFIG_INVALID` as
        `TablePolicy.shape`.
    """
    if len(raw) > BLOCK_BYTES_MAX:
        raise TailraceError(Kind.DECODE_FAILED, "decoded a block: it is longer than 2 GiB")
    summary = frames.summarise(raw, frames.state_within(open_at_start, 0, 0))
    listed = summary.tables
    if tables is not None and listed is not None and tables.isdisjoint(listed):
        return []
    if summary.rows > len(raw):
        raise _violation(kernel.TOO_MANY_CHANGES, 0)
    tables_max = summary.rows if listed is None else min(summary.rows, frames.TABLES_LISTED_MAX)
    slots = np.zeros((1 << (2 * tables_max + 2).bit_length(), 3), np.int64)
    changes = np.empty((kernel.CHANGE_FIELDS, summary.rows), np.int64)
    groups = np.empty((summary.rows + 1, 3), np.int64)
    schema_at = np.empty(len(raw) // frames.CONTROL_JSON_AT + 1 if summary.has_schema else 0, np.int64)
    result = np.empty(kernel.RESULT_FIELDS, np.int64)
    state = frames.state_within(open_at_start, 0, 0)
    if state[frames.OPEN] == frames.SNAPSHOT_OPEN:
        state[frames.XID] = kernel.NONE
    kernel.index_changes(
        raw, log_offset, state, np.array(sorted(tables or ()), np.int64), tables is None,
        changes, groups, slots, schema_at, result,
    )  # fmt: skip
    if result[kernel.ERROR]:
        raise _violation(int(result[kernel.ERROR]), int(result[kernel.ERROR_AT]))
    in_block = [_frame(raw, int(at)) for at in schema_at[: result[kernel.SCHEMAS]]]
    relations, group_of = _relations(
        groups[: result[kernel.GROUPS]], Catalog(schema, modes, settled), in_block
    )
    parts = _by_group(changes, int(result[kernel.CHANGES]), group_of, len(relations))
    has_shards = summary.has_schema or beyond is not None
    shards = BlockShards(raw, open_at_start, beyond) if has_shards else None
    return [
        changes
        for relation, part in zip(relations, parts, strict=True)
        for changes in _bounded(TableChanges(relation, raw, part, _views(relation, table_policy), shards))
    ]


def no_changes(relation: Relation, table_policy: TablePolicy = EVERYTHING) -> TableChanges:
    """Return an empty `TableChanges` that has only the table's relation, as consumers see it.

    :raises TailraceError: `CONFIG_INVALID` as `TablePolicy.shape`.
    """
    fields = np.empty((kernel.CHANGE_FIELDS, 0), np.int64)
    return TableChanges(relation, np.empty(0, np.uint8), fields, _views(relation, table_policy))


def _views(relation: Relation | None, table_policy: TablePolicy) -> tuple[Shape, ...]:
    if relation is not None and relation.pending:
        raise TailraceError(
            Kind.SCHEMA_PENDING,
            "decode changes: the catalogue facts of their table are not known yet, because the transaction "
            "that altered it is committed and not visible to other sessions",
            "Tailrace tries again. Such a commit waits for a synchronous standby (wait_event SyncRep in "
            "pg_stat_activity): start the standby, or take it out of synchronous_standby_names",
            {"table": relation.qualified_name},
        )
    shape = None if relation is None else table_policy.shape(relation)
    return () if shape is None else (shape,)


def _relations(
    groups: Numbers, catalog: Catalog, in_block: Sequence[bytes]
) -> tuple[list[Relation | None], Numbers]:
    # The kernel opens a group whenever a table's Relation message is repeated. If it is unchanged, as
    # after each reconnection, the groups are merged, unless rows of a snapshot came between them: a
    # table's groups must follow each other in log order.
    relations: list[Relation | None] = []
    newest: dict[int, tuple[int, int]] = {}  # by oid: key of the last group, index in `relations`
    group_of = np.full(len(groups), -1, np.int64)
    applied = 0
    for group, (key, schemas, wanted) in enumerate(groups.tolist()):
        if not wanted:
            continue
        for frame in in_block[applied:schemas]:
            catalog.apply(frame)
        applied = max(applied, schemas)
        oid = key & kernel.OID_BITS
        relation = None if key == kernel.MESSAGE_KEY else catalog.relation(oid)
        before, place = newest.get(oid, (-1, 0))
        if before != key or relations[place] != relation:
            place = len(relations)
            relations.append(relation)
        newest[oid] = (key, place)
        group_of[group] = place
    return relations, group_of


def _by_group(changes: Numbers, count: int, group_of: Numbers, parts: int) -> list[Numbers]:
    if parts <= 1:
        return [changes[:, :count]] * parts
    sizes = np.bincount(group_of[changes[kernel.GROUP, :count]], minlength=parts)
    ends = np.cumsum(sizes)
    ordered = np.empty((kernel.CHANGE_FIELDS, count), np.int64)
    kernel.sort_by_group(changes, count, group_of, ends - sizes, ordered)
    return [ordered[:, end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _bounded(changes: TableChanges) -> list[TableChanges]:
    # The block's bytes bound the number of cells, except those of TRUNCATEs, which are split instead.
    columns = len(changes.relation.columns) if changes.relation is not None else 0
    if changes.count * columns <= EMPTY_CELLS_MAX or not (changes.op == ord(Op.TRUNCATE)).any():
        return [changes]
    step = EMPTY_CELLS_MAX // columns
    return [changes.part(first, first + step) for first in range(0, changes.count, step)]


def _packed(raw: Bytes, fields: Numbers) -> tuple[Bytes, Numbers]:
    """Return only the bytes of the block that the changes `fields` use, and their fields for these bytes.

    If the changes fill half of the span that contains them, that is the span.
    """
    at, end = fields[kernel.AT], fields[kernel.END]
    if not len(at):
        return raw[:0], fields
    fields = fields.copy()
    first, last, length = int(at.min()), int(end.max()), end - at
    if last - first <= 2 * int(length.sum()):
        fields[kernel.AT], fields[kernel.END] = at - first, end - first
        return raw[first:last], fields
    kind = np.full(len(at), kernel.TEXT, np.uint8)
    cells = Cells(raw, at.astype(np.int32), length.astype(np.int32), kind)
    packed, offsets = text_buffers(gather_bytes(cells))
    fields[kernel.AT], fields[kernel.END] = offsets[:-1], offsets[1:]
    return packed[: offsets[-1]], fields


def _frame(raw: Bytes, at: int) -> bytes:
    length = int.from_bytes(raw[at + 1 : at + 5].tobytes(), "big")
    return raw[at : at + 1 + length].tobytes()


def _violation(error: int, byte: int) -> TailraceError:
    return TailraceError(
        Kind.PROTOCOL_VIOLATION,
        f"decoded a block: {kernel.ERRORS[error]}",
        REPORT_LOG,
        {"byte": byte},
    )
