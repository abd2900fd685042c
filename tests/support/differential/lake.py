"""Reads what sinks wrote, by pyarrow, json and delta-rs, and compares it with the log's history.

A history in files must have each change of the log, at its place, with the log's values; a mirror
must have the rows of the history folded up to there.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from tests.support.differential.fold import EXAMPLES
from tests.support.differential.history import Change, Row
from tests.support.differential.values import is_same, is_same_json, is_same_text, plain

NOT_SENT = "__debezium_unavailable_value"


@dataclass(frozen=True, slots=True)
class Held:
    """A row of a history or a mirror: values by column, and the text of those that have no type."""

    values: dict[str, tuple[Any, pa.DataType]]
    special: dict[str, str | None]

    def differs(self, row: Row, *, may_be_text: bool = False) -> list[str]:
        """Return the columns in which this differs from `row`.

        :param may_be_text: columns may have become text with the same meaning.
        """
        return [name for name, text in row.items() if not self._has(name, text, may_be_text=may_be_text)]

    def _has(self, name: str, text: str | None, *, may_be_text: bool) -> bool:
        if name not in self.values:
            return False
        value, kind = self.values[name]
        if self.special.get(name) is not None:
            return self.special[name] == text
        if may_be_text and isinstance(value, str) and text is not None and is_same_text(text, value):
            return True
        return is_same(text, value, kind)


def history_problems(kind: str, path: Path, changes: Sequence[Change]) -> list[str]:
    """Return how the history in a sink of `kind` (jsonl, parquet, append) differs from the log's."""
    found = dict(_json_lines(path)) if kind == "jsonl" else None
    lines = found if found is not None else dict(_typed_rows(kind, path))
    wanted = {change.log_offset: change for change in changes if change.message is None}
    told = [
        f"{kind}: no change at offset {at}: {wanted[at].op} of {wanted[at].name}"
        for at in wanted.keys() - lines.keys()
    ]
    told += [f"{kind}: a change at offset {at} that the log has not" for at in lines.keys() - wanted.keys()]
    for at in wanted.keys() & lines.keys():
        compare: Any = _json_differs if kind == "jsonl" else _row_differs
        if problem := compare(wanted[at], lines[at]):
            told.append(f"{kind}: {wanted[at].op} of {wanted[at].name} at offset {at}: {problem}")
    return told[:EXAMPLES]


def mirror_problems(path: Path, name: str, rows: Iterable[Row], columns: Collection[str]) -> list[str]:
    """Return how the mirror of a table differs from its rows, the smallest `uid` first.

    :param columns: that the table has, whether or not there are rows.
    """
    wanted = {int(row["uid"] or 0): row for row in rows}
    folder = path / name
    if not (folder / "_delta_log").is_dir():
        return [f"mirror of {name}: there is none"] if wanted else []
    content = DeltaTable(str(folder)).to_pyarrow_table()
    if set(content.column_names) != {*columns, "_position"}:
        return [f"mirror of {name}: it has the columns {content.column_names}, not {sorted(columns)}"]
    held = list(_held(content, "_position"))
    found = {row.values["uid"][0]: row for row in held}
    told = [] if len(found) == len(held) else [f"mirror of {name}: a row stands there twice"]
    told += [f"mirror of {name}: uid {uid} is missing" for uid in sorted(wanted.keys() - found.keys())]
    told += [f"mirror of {name}: uid {uid} is too many" for uid in sorted(found.keys() - wanted.keys())]
    for uid in sorted(wanted.keys() & found.keys()):
        if differs := found[uid].differs(wanted[uid]):
            shown = {
                each: (wanted[uid][each], found[uid].values.get(each, ("no column",))[0]) for each in differs
            }
            told.append(f"mirror of {name}: uid {uid} differs: (source, mirror) {str(shown)[:300]}")
    return told[:EXAMPLES]


def _row_differs(change: Change, found: tuple[dict[str, Any], Held]) -> str | None:
    meta, held = found
    place = (change.op, change.commit_lsn, change.ordinal)
    if (meta["_op"], meta["_commit_lsn"], meta["_ordinal"]) != place:
        return f"it is told as {meta}"
    row = (change.before if change.op == "d" else change.after) or {}
    unsent = set(change.columns) - set(row) if change.op in "cur" else set()
    if set(meta["_unchanged"] or ()) != unsent:
        return f"unchanged are {meta['_unchanged']}, not {sorted(unsent)}"
    if differs := held.differs(row, may_be_text=True):
        return f"differs in {differs}: {str({c: (row[c], held.values.get(c)) for c in differs})[:300]}"
    return None


def _json_differs(change: Change, line: dict[str, Any]) -> str | None:
    position = line["position"]
    if (line["op"], position["commit_lsn"], position["ordinal"]) != (
        change.op,
        change.commit_lsn,
        change.ordinal,
    ):
        return f"it is told as {line['op']} {position}"
    for side, row in (("before", change.before), ("after", change.after)):
        told = line[side]
        if (told is None) != (row is None):
            return f"{side} is there or not"
        if told is None or row is None:
            continue
        sent = {name: value for name, value in told.items() if name in row}
        unsent = {name: value for name, value in told.items() if name not in row}
        if sent.keys() != row.keys() or any(NOT_SENT not in str(value) for value in unsent.values()):
            return f"{side} has the columns {sorted(told)}"
        differs = [name for name in row if not is_same_json(row[name], sent[name], change.types[name])]
        if differs:
            return f"{side} differs in {str({c: (row[c], sent[c]) for c in differs})[:300]}"
    return None


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for file in _visible(path, "*.jsonl"):
        for line in file.read_text("utf-8").split("\n")[:-1]:
            change = json.loads(line)
            yield change["position"]["log_offset"], change


def _typed_rows(kind: str, path: Path) -> Iterator[tuple[int, tuple[dict[str, Any], Held]]]:
    files = _visible(path, "*.parquet") if kind == "parquet" else _in_delta(path)
    for file in files:
        content = pq.ParquetFile(file).read()
        names = ["_op", "_commit_lsn", "_ordinal", "_log_offset", "_unchanged"]
        for meta, held in zip(content.select(names).to_pylist(), _held(content, "_special"), strict=True):
            yield meta["_log_offset"], (meta, held)


def _held(content: pa.Table, special: str) -> Iterator[Held]:
    own = [name for name in content.column_names if not name.startswith("_")]
    columns = [(name, plain(content[name]), content.schema.field(name).type) for name in own]
    texts = content[special].to_pylist()
    for at, text in enumerate(texts):
        told = text["special"] if special == "_position" and text else text
        yield Held({name: (values[at], kind) for name, values, kind in columns}, dict(told or ()))


def _visible(path: Path, pattern: str) -> list[Path]:
    return [
        file
        for file in sorted(path.glob(f"*/{pattern}"))
        if not file.parent.name.startswith(("_", ".")) and not file.name.startswith(("_", "."))
    ]


def _in_delta(path: Path) -> Iterator[Path]:
    for folder in sorted(path.iterdir()):
        if (folder / "_delta_log").is_dir():
            yield from (Path(uri.removeprefix("file://")) for uri in DeltaTable(str(folder)).file_uris())
