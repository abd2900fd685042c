"""One Delta table, as the driver sees it: created, extended and replaced by delta-rs commits.

Each commit carries a transaction (application id, version): which log, pipeline, table and
task, and the log offset up to which the table then has everything. Delta keeps it with the
table; a commit whose transaction somebody else has moved on since is refused, so two engines
can't both commit a range, even where a lock does not hold.

A commit whose outcome is unknown is looked up, never repeated blindly.
"""

from __future__ import annotations

import json
import os
import re
import time
import urllib.parse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake import Schema as DeltaSchema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from tailrace.changelog import durable
from tailrace.errors import Kind, TailraceError
from tailrace.sinks.key_bounds import NOTHING

_NAME_REFUSED = frozenset(" ,;{}()\n\t=")

#: Times that a commit is tried while others (OPTIMIZE, VACUUM, a person) commit to the table.
COMMIT_ATTEMPTS_MAX = 8
#: As many columns have statistics as in any Delta table.
_STATISTICS_COLUMNS_MAX = 32
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class AddedFile:
    """A data file in the table's folder, to be made part of the table."""

    name: str
    rows: int
    bytes: int
    facts: dict[str, Any]


class DeltaFolder:
    """The Delta table in one folder, or the place where one will be.

    `table` is its name for people; `application` is what its transactions are kept under.
    """

    def __init__(self, path: Path, sink: str, table: str, application: str) -> None:
        self.path = path
        self.sink = sink
        self.table = table
        self.application = application
        self._context = {"sink": sink, "table": table}
        self._delta: DeltaTable | None = None
        self._durable = -1  # the table's version up to which all is on disk

    def committed(self) -> int | None:
        """Return the log offset up to which the table has everything; None: nothing.

        Read anew from the table. None, too, for a table that is not this pipeline's.

        :raises TailraceError: `SINK_WRITE_FAILED` if it can't be read.
        """
        delta = self._current()
        return None if delta is None else delta.transaction_version(self.application)

    def require_ours(self) -> None:
        """Check that the table, if there is one, was made for this pipeline and log.

        :raises TailraceError: `SINK_FOREIGN`.
        """
        if self._delta is not None and self._delta.transaction_version(self.application) is None:
            raise TailraceError(
                Kind.SINK_FOREIGN,
                "write to a Delta table: it has no record of this pipeline and log",
                "another writer made it, or made it anew: move the table away, or give the sink a "
                "path of its own",
                self._context,
            )

    def exists(self) -> bool:
        """Tell whether there was a table when it was last looked at."""
        return self._delta is not None

    def schema(self) -> pa.Schema:
        """Return the table's columns, as last read or committed; empty if there is no table."""
        return pa.schema([]) if self._delta is None else pa.schema(self._delta.schema().to_arrow())

    def bytes(self) -> int:
        """Return the size of the table's data files, as last read or committed."""
        if self._delta is None:
            return 0
        return sum(pa.table(self._delta.get_add_actions(flatten=True))["size_bytes"].to_pylist())

    def highest(self, column: str) -> int | None:
        """Return the greatest value of a column of whole numbers, by the files' statistics; None
        if they don't tell, `key_bounds.NOTHING` if there are no files.
        """
        assert self._delta is not None, "only of an existing table"
        added = pa.table(self._delta.get_add_actions(flatten=True))
        if not len(added):
            return NOTHING
        if f"max.{column}" not in added.column_names:
            return None
        bounds = added[f"max.{column}"]
        known = bounds.null_count == 0 and pa.types.is_integer(bounds.type)
        return int(pc.max(bounds).as_py()) if known else None

    def evolve(self, wanted: pa.Schema) -> None:
        """Give the table the columns of `wanted` that it lacks, in a commit of its own.

        Again is harmless. Columns that `wanted` lacks stay.

        :raises TailraceError: `SINK_SCHEMA_REFUSED` if a column's type is another one.
        """
        if not check_types(self.schema(), wanted, self._context):
            return

        def commit(delta: DeltaTable) -> None:
            missing = check_types(self.schema(), wanted, self._context)
            if missing:
                delta.alter.add_columns(DeltaSchema.from_arrow(pa.schema(missing)).fields)

        self._attempt("add columns to a Delta table", commit)

    def create(self, schema: pa.Schema, files: Sequence[AddedFile], version: int) -> None:
        """Make the table, with its first files, in one commit.

        :raises TailraceError: `SINK_SCHEMA_REFUSED`, `SINK_WRITE_FAILED`.
        """
        try:
            create_table_with_add_actions(
                str(self.path),
                DeltaSchema.from_arrow(schema),
                [_add(file) for file in files],
                mode="error",
                configuration=_configuration(schema),
                commit_properties=self._properties(version),
            )
        except DeltaError as error:
            if self.committed() == version:
                return
            raise self._refused("create a Delta table", error) from error
        self._current()

    def append(self, files: Sequence[AddedFile], version: int) -> None:
        """Add files and move the table's transaction to `version`, in one commit.

        :raises TailraceError: `SINK_WRITE_FAILED`.
        """
        self._write(files, "append", version)

    def replace(self, files: Sequence[AddedFile], version: int) -> None:
        """Make `files` all that the table has, in one commit.

        :raises TailraceError: `SINK_WRITE_FAILED`.
        """
        self._write(files, "overwrite", version)

    def make_durable(self) -> None:
        """Put the table's last commits, and the files that they name, on disk.

        Neither delta-rs nor Spark does; the sink's own position must not outlive a commit.
        """
        log = self.path / "_delta_log"
        delta = self._current()
        assert delta is not None, "only after a commit"
        for version in range(self._durable + 1, delta.version() + 1):
            commit = log / f"{version:020d}.json"
            # Not `splitlines`: a table's statistics may hold U+2028, which JSON does not escape.
            actions = [json.loads(line) for line in commit.read_bytes().split(b"\n") if line]
            for path in (action["add"]["path"] for action in actions if "add" in action):
                _sync(self.path / urllib.parse.unquote(path))
            _sync(commit)
        durable.sync_directory(log)
        durable.sync_directory(self.path)
        self._durable = delta.version()

    # ------------------------------------------------------------------ commits

    def _write(self, files: Sequence[AddedFile], mode: str, version: int) -> None:
        actions: list[AddAction | RemoveAction] = [_add(file) for file in files]
        properties = self._properties(version)

        def commit(delta: DeltaTable) -> None:
            if delta.transaction_version(self.application) != version:
                delta.create_write_transaction(actions, mode, delta.schema(), commit_properties=properties)

        self._attempt("commit to a Delta table", commit)

    def _attempt(self, attempted: str, commit: Any) -> None:
        for attempt in range(COMMIT_ATTEMPTS_MAX):
            delta = self._current()
            assert delta is not None, "only of an existing table"
            try:
                commit(delta)
            except CommitFailedError as error:
                # Somebody else committed first, or this commit did happen: look again.
                if attempt + 1 == COMMIT_ATTEMPTS_MAX:
                    raise self._refused(attempted, error) from error
                time.sleep(0.01 * 2**attempt)
            except (DeltaError, OSError) as error:
                raise self._refused(attempted, error) from error
            else:
                self._current()
                return

    def _properties(self, version: int) -> CommitProperties:
        return CommitProperties(
            app_transactions=[Transaction(self.application, version)], max_commit_retries=1
        )

    def _current(self) -> DeltaTable | None:
        try:
            if self._delta is not None:
                self._delta.update_incremental()
            elif (self.path / "_delta_log").is_dir():
                self._delta = DeltaTable(str(self.path))
                # Commits before this one are another process's, who put them on disk; the last
                # may be one that died before it did.
                self._durable = self._delta.version() - 1
        except TableNotFoundError:
            self._delta = None
        except (DeltaError, OSError) as error:
            self._delta = None
            raise self._refused("read a Delta table", error) from error
        return self._delta

    def _refused(self, attempted: str, error: Exception) -> TailraceError:
        # delta-rs's messages speak of files, columns and versions, never of rows.
        found = str(error).splitlines()[0] if str(error) else type(error).__name__
        return TailraceError(
            Kind.SINK_WRITE_FAILED,
            f"{attempted}: {found}",
            "check the table's folder; what was committed is known and will not be written again",
            self._context,
        )


def check_types(have: pa.Schema, wanted: pa.Schema, context: dict[str, str]) -> list[pa.Field]:
    """Return the columns of `wanted` that `have` lacks.

    :raises TailraceError: `SINK_SCHEMA_REFUSED` if a column is there with another type.
    """
    missing = []
    for field in wanted:
        at = have.get_field_index(field.name)
        if at < 0:
            missing.append(field)
        elif not _same_type(have.field(at).type, field.type):
            raise TailraceError(
                Kind.SINK_SCHEMA_REFUSED,
                f"follow a change of schema: column {field.name!r} is {have.field(at).type} in the "
                f"target and {field.type} in the source now",
                "choose: convert the column in the target (read it with Spark, cast the column, "
                "overwrite the table with overwriteSchema) and start again; or give the sink a new, "
                "empty path and let it read the log from its start; or leave the table out of the "
                "sink's `tables`",
                {**context, "column": field.name},
            )
    return missing


def united(schemas: Iterable[pa.Schema], context: dict[str, str]) -> pa.Schema:
    """Return the columns of all of `schemas`, in order of appearance.

    :raises TailraceError: `SINK_SCHEMA_REFUSED` if a column has two types among them.
    """
    result = pa.schema([])
    for schema in schemas:
        for field in check_types(result, schema, context):
            result = result.append(field)
    _check_names(result.names, context)
    return result


def _check_names(names: Sequence[str], context: dict[str, str]) -> None:
    """Refuse names that Delta can't hold, or not beside another: it ignores case."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(name.casefold(), name)
        if other != name:
            found = f"columns {other!r} and {name!r} differ by case alone"
        elif any(letter in name for letter in _NAME_REFUSED):
            found = f"column {name!r} has a character that Delta refuses in names"
        else:
            continue
        raise TailraceError(
            Kind.SINK_SCHEMA_REFUSED,
            f"make a Delta table: {found}",
            "rename the column in the source, or leave the table out of the sink's `tables`; a "
            "Parquet or JSON Lines sink takes it as it is",
            {**context, "column": name},
        )


def _same_type(first: pa.DataType, second: pa.DataType) -> bool:
    # Delta has one string, one list; Arrow has several, and names for the items of a list.
    return bool(
        DeltaSchema.from_arrow(pa.schema([pa.field("c", first)]))
        == DeltaSchema.from_arrow(pa.schema([pa.field("c", second)]))
    )


def _configuration(schema: pa.Schema) -> dict[str, str]:
    """Return the properties of a new table.

    Statistics are kept of whole numbers, decimals and texts alone. A bound of a date or time may
    lie outside of the years 1 to 9999 (PostgreSQL's infinity does), and some readers, deltalake
    among them, can't open a table whose statistics say so.
    """
    names = [
        field.name
        for field in schema
        if _PLAIN_NAME.fullmatch(field.name)
        and (
            pa.types.is_integer(field.type)
            or pa.types.is_decimal(field.type)
            or pa.types.is_string(field.type)
        )
    ][:_STATISTICS_COLUMNS_MAX]
    kept = (
        {"delta.dataSkippingStatsColumns": ",".join(names)}
        if names
        else {"delta.dataSkippingNumIndexedCols": "0"}
    )
    # A commit a second makes a file a second in the table's log; a day of them is kept.
    return {"delta.logRetentionDuration": "interval 1 days", **kept}


def _add(file: AddedFile) -> AddAction:
    statistics = {
        "numRecords": file.rows,
        "minValues": file.facts.get("lowest", {}),
        "maxValues": file.facts.get("highest", {}),
        "nullCount": file.facts.get("nulls", {}),
    }
    return AddAction(
        path=file.name,
        size=file.bytes,
        partition_values={},
        modification_time=int(time.time() * 1000),
        data_change=True,
        stats=json.dumps(statistics),
    )


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
