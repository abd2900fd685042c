"""The two merges that Spark does, row by row in Python: a second implementation, and a fast one.

Spark takes seconds for the smallest merge, so a seed with hundreds of ranges would take too long.
`test_pipeline` uses Spark itself.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from tailrace.errors import Kind, TailraceError
from tailrace.sinks.delta.folder import AddedFile, DeltaFolder
from tailrace.sinks.delta.mirror import sink as mirror
from tailrace.sinks.delta.mirror.files import POSITION, POSITION_TYPE, read_events
from tailrace.sinks.delta.mirror.merge import NetSource
from tailrace.sinks.files.parquet import ParquetWriter
from tests.support.differential.values import plain

Texts = dict[str, str | None]


def without_spark(patch: pytest.MonkeyPatch) -> None:
    """Let mirrors merge in Python whatever Spark would merge."""
    patch.setattr(mirror, "merge", merge)
    patch.setattr(mirror, "merge_rows", merge_rows)


@dataclass
class _Row:
    """A row of the result: where each column's value is, first in the target, then in the changes."""

    places: dict[str, int | None]
    offset: int
    special: Texts


def merge(_spark: Any, folder: DeltaFolder, source: NetSource, version: int) -> None:
    """As `merge.merge`."""
    schema = folder.schema()
    target = _target(folder, schema)
    changes = pa.concat_tables([read_events(path, schema, source.key) for path in source.paths])
    rows = _rows(target, source.columns)
    first = len(rows)
    keys = _keys(target, [row.special for row in rows], source)
    held = dict(zip(keys, range(first), strict=True))
    assert len(held) == first, "a key stands there twice"
    special = [dict(each or ()) for each in changes["_special"].to_pylist()]
    origins = _origins(changes, source)
    after: dict[int, _Row] = dict(enumerate(rows))
    told = zip(
        _keys(changes, special, source), changes["_log_offset"].to_pylist(), changes["_upsert"].to_pylist(),
        changes["_unchanged"].to_pylist(), origins, strict=True,
    )  # fmt: skip
    for number, (key, offset, upsert, unchanged, origin) in enumerate(told):
        at = held.get(key)
        if at is not None and offset <= rows[at].offset:
            continue
        if not upsert:
            if at is not None:
                del after[at]
            continue
        old = at if origin is None else held.get(origin)
        texts: Texts = dict(special[number])
        places: dict[str, int | None] = dict.fromkeys(source.columns, first + number)
        for name in unchanged:
            places[name] = None if old is None else rows[old].places[name]
            if old is None:
                texts[name] = None
            elif name in rows[old].special:
                texts[name] = rows[old].special[name]
        after[first + number if at is None else at] = _Row(places, offset, texts)
    _commit(folder, pa.concat_tables([_own(target, source.columns), _own(changes, source.columns)]),
            list(after.values()), version)  # fmt: skip


def merge_rows(
    _spark: Any, folder: DeltaFolder, paths: list[str], columns: list[str], version: int, *, from_empty: bool
) -> None:
    """As `whole_rows.merge_rows`."""
    schema = folder.schema()
    target = _target(folder, schema)
    if from_empty:
        target = target.slice(0, 0)
    parts = [pq.read_table(path) for path in paths]
    came = [
        flag
        for part in parts
        for flag in (part["_upsert"].to_pylist() if "_upsert" in part.column_names else [True] * len(part))
    ]
    changes = pa.concat_tables([part.select(schema.names).cast(schema) for part in parts])
    rows, moves = _rows(target, columns), _rows(changes, columns, len(target))
    after = dict(enumerate([*rows, *moves]))
    more: Counter[str] = Counter()
    known, new = _wholes(target, columns, rows), _wholes(changes, columns, moves)
    there: dict[str, list[int]] = defaultdict(list)
    for at, whole in enumerate(known):
        there[whole].append(at)
    fresh: dict[str, list[int]] = defaultdict(list)
    for at, (whole, flag) in enumerate(zip(new, came, strict=True)):
        more[whole] += 1 if flag else -1
        if flag:
            fresh[whole].append(len(rows) + at)
        else:
            del after[len(rows) + at]
    for whole, count in more.items():
        kept = fresh[whole][len(fresh[whole]) - max(count, 0) :]
        gone = [at for at in fresh[whole] if at not in kept]
        if len(there[whole]) < -count:
            raise TailraceError(Kind.SINK_DAMAGED, "a row went that the mirror does not have")
        for at in (*gone, *there[whole][: max(-count, 0)]):
            del after[at]
    _commit(folder, pa.concat_tables([_own(target, columns), _own(changes, columns)]),
            list(after.values()), version)  # fmt: skip


def _target(folder: DeltaFolder, schema: pa.Schema) -> pa.Table:
    return DeltaTable(str(folder.path)).to_pyarrow_table().select(schema.names).cast(schema)


def _own(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    return table.select(list(columns)).replace_schema_metadata(None)


def _rows(table: pa.Table, columns: Sequence[str], first: int = 0) -> list[_Row]:
    return [
        _Row(dict.fromkeys(columns, first + at), held["log_offset"], dict(held["special"] or ()))
        for at, held in enumerate(table[POSITION].to_pylist())
    ]


def _keys(table: pa.Table, special: Sequence[Texts], source: NetSource) -> list[tuple[Any, ...]]:
    values = [plain(table[name]) for name in source.key]
    return [
        (*(column[at] for column in values), *(texts.get(name) for name in source.texts))
        for at, texts in enumerate(special)
    ]


def _origins(changes: pa.Table, source: NetSource) -> list[tuple[Any, ...] | None]:
    origin = changes["_origin"].combine_chunks()
    columns = {name: pa.chunked_array([origin.field(name)]) for name in source.key}
    special = [dict(each or ()) for each in origin.field("_special").to_pylist()]
    keys = _keys(pa.table(columns), special, source)
    return [key if there else None for key, there in zip(keys, origin.is_valid().to_pylist(), strict=True)]


def _wholes(table: pa.Table, columns: Sequence[str], rows: Sequence[_Row]) -> list[str]:
    values = [plain(table[name]) for name in columns]
    return [repr(([column[at] for column in values], row.special)) for at, row in enumerate(rows)]


def _commit(folder: DeltaFolder, values: pa.Table, rows: Sequence[_Row], version: int) -> None:
    schema = folder.schema()
    position = [{"log_offset": row.offset, "special": list(row.special.items()) or None} for row in rows]
    columns = {
        name: values[name].take(pa.array([row.places[name] for row in rows], pa.int64()))
        for name in values.column_names
    }
    columns[POSITION] = pa.chunked_array([pa.array(position, POSITION_TYPE)])
    made = pa.table({name: columns[name] for name in schema.names})
    name = f"merged-{os.urandom(6).hex()}.parquet"
    writer = ParquetWriter(str(folder.path / name), "zstd")
    writer.write_table(made)
    facts = writer.close()
    size = (folder.path / name).stat().st_size
    folder.replace([AddedFile(name, len(made), size, facts)] if rows else [], version, schema)
