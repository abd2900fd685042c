"""One Delta table, as the driver sees it: created, extended and replaced by delta-rs commits.

Each commit carries a transaction (application id, version): which log, pipeline, table and
task, and the log offset up to which the table then has everything. Delta keeps it with the
table; a commit whose transaction somebody else has moved on since is refused, so two engines
can't both commit a range, even where a lock does not hold.

A commit whose outcome is unknown is looked up, never repeated blindly.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, TableFeatures, Transaction
from deltalake import Schema as DeltaSchema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from tailrace.backoff import Backoff
from tailrace.changelog import durable
from tailrace.changelog.durable import sync_file
from tailrace.errors import Kind, TailraceError
from tailrace.sinks.delta.evolution import held_columns
from tailrace.sinks.delta.key_bounds import NOTHING

#: What a table may have of Delta without its files being more, or less, than its rows.
_PLAIN_FEATURES = frozenset({"timestampNtz"})
_STATISTICS_PROPERTIES = ("delta.dataSkippingStatsColumns", "delta.dataSkippingNumIndexedCols")

#: Times that a commit is tried while others (OPTIMIZE, VACUUM, a person) commit to the table.
COMMIT_ATTEMPTS_MAX = 8
#: As many columns have statistics as in any Delta table.
_STATISTICS_COLUMNS_MAX = 32
_UNWRITABLE = "check the table's folder; what was committed is known and will not be written again"
_UNREADABLE = (
    "check the table's folder. After a loss of power its last commits may be half-written: remove the files "
    "_delta_log/<version>.json that can't be read, from the highest version down; what they held is written "
    "again"
)
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
        self.context = {"sink": sink, "table": table}
        self._delta: DeltaTable | None = None
        self._durable = -1  # the table's version up to which all is on disk

    def committed(self) -> int | None:
        """Return the log offset up to which the table has everything; None: nothing.

        Read again from the table. None, too, for a table that is not this pipeline's.

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
                "another writer made it, or created it again: move the table away, or give the sink a "
                "path of its own",
                self.context,
            )

    def exists(self) -> bool:
        """Return whether there was a table when it was last looked at."""
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
        if they have none, `key_bounds.NOTHING` if there are no files.
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

    def relation(self) -> int:
        """Return the oid of the relation whose rows the table has, by its columns; 0: not known."""
        if self._delta is None:
            self._current()
        return max((column.relation for column in held_columns(self.schema())), default=0)

    def data_files(self) -> list[str]:
        """Return the paths of the table's data files, to be read as they are.

        :raises TailraceError: `SINK_SCHEMA_REFUSED` if the table uses something of Delta that
            makes its files more than what its readers see.
        """
        assert self._delta is not None, "only of an existing table"
        foreign = set(self._delta.protocol().reader_features or ()) - _PLAIN_FEATURES
        partitioned = bool(self._delta.metadata().partition_columns)
        if foreign or partitioned:
            raise TailraceError(
                Kind.SINK_SCHEMA_REFUSED,
                "follow a change of schema: the table was given features that its files can't be rewritten "
                f"with ({', '.join(sorted(foreign)) or 'partitions'})",
                # DROP FEATURE leaves `checkpointProtection`, which delta-rs can't write either.
                "give the sink a new, empty path and let it read the log from its start",
                self.context,
            )
        added = pa.table(self._delta.get_add_actions(flatten=True))
        paths = added["path"].to_pylist() if len(added) else []
        return [str(self.path / urllib.parse.unquote(path)) for path in paths]

    def add_columns(self, fields: Sequence[pa.Field]) -> None:
        """Give the table those of these columns that it lacks, in a separate commit.

        Again is harmless. Rows from before have NULL in them.

        :raises TailraceError: `SINK_WRITE_FAILED`.
        """

        def commit(delta: DeltaTable) -> None:
            have = self.schema().names
            missing = [field for field in fields if field.name not in have]
            if missing:
                delta.alter.add_columns(DeltaSchema.from_arrow(pa.schema(missing)).fields)

        if fields:
            self._attempt("add columns to a Delta table", commit)

    def unnoted(self, schema: pa.Schema) -> list[pa.Field]:
        """Return those of `schema`'s columns, which the table has, that have other metadata than there."""
        have = self.schema()
        return [field for field in schema if field.metadata not in (None, have.field(field.name).metadata)]

    def note_columns(self, schema: pa.Schema) -> None:
        """Store the metadata of `schema`'s columns with the table's, where it differs.

        A column's values may stay though its type changes, and the next change begins from there.

        :raises TailraceError: `SINK_WRITE_FAILED`.
        """
        for field in self.unnoted(schema):
            metadata = {name.decode(): value.decode() for name, value in field.metadata.items()}
            self._attempt(
                "note a column's type in a Delta table",
                lambda delta, name=field.name, metadata=metadata: delta.alter.set_column_metadata(
                    name, metadata
                ),
            )

    def reshape(self, files: Sequence[AddedFile], schema: pa.Schema) -> None:
        """Put `files`, the same rows in another shape, in the place of what the table has.

        One commit, which leaves the table's transaction where it is.

        :raises TailraceError: `SINK_WRITE_FAILED`, also if somebody else committed since the
            table's files were read: nothing has changed then.
        """
        delta = self._delta
        assert delta is not None, "only of an existing table"
        read = delta.version()
        self._allow(schema)
        if (delta := self._delta) is None or delta.version() > read + 1:
            raise self._refused("rewrite a Delta table", DeltaError("another writer committed meanwhile"))
        try:
            delta.create_write_transaction(
                [_add(file) for file in files],
                "overwrite",
                DeltaSchema.from_arrow(schema),
                commit_properties=CommitProperties(max_commit_retries=0),
            )
        except (DeltaError, CommitFailedError, OSError) as error:
            raise self._refused("rewrite a Delta table", error) from error
        self._current()
        self._keep_statistics(schema)

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

    def replace(self, files: Sequence[AddedFile], version: int, schema: pa.Schema) -> None:
        """Make `files` all that the table has, and `schema` its columns, in one commit.

        :raises TailraceError: `SINK_WRITE_FAILED`.
        """
        if self.committed() != version:
            self._allow(schema)
        self._write(files, "overwrite", version, schema)
        self._keep_statistics(schema)

    def make_durable(self, since: int) -> None:
        """Put the table's commits since its transaction was at `since`, and their files, on disk.

        Neither delta-rs nor Spark does; the sink's own position must not outlive a commit. They may be
        those of a process that died before it did.
        """
        log = self.path / "_delta_log"
        delta = self._current()
        assert delta is not None, "only after a commit"
        if delta.version() == self._durable:
            return
        for version in range(delta.version(), self._durable, -1):
            commit = log / f"{version:020d}.json"
            with contextlib.suppress(FileNotFoundError):  # few versions have one; it takes older ones' place
                sync_file(log / f"{version:020d}.checkpoint.parquet")
                sync_file(log / "_last_checkpoint")
            try:
                # Not `splitlines`: a table's statistics may hold U+2028, which JSON does not escape.
                actions = [json.loads(line) for line in commit.read_bytes().split(b"\n") if line]
            except FileNotFoundError:
                break  # too old for Delta to keep it: a checkpoint has it
            for path in (action["add"]["path"] for action in actions if "add" in action):
                with contextlib.suppress(FileNotFoundError):  # another one took its place, VACUUM took it
                    sync_file(self.path / urllib.parse.unquote(path))
            sync_file(commit)
            if any(self._is_up_to(action, since) for action in actions):
                break
        for directory in (log, self.path, self.path.parent):
            durable.sync_directory(directory)
        self._durable = delta.version()

    def _is_up_to(self, action: dict[str, Any], since: int) -> bool:
        moved = action.get("txn", {})
        return bool(moved.get("appId") == self.application and moved["version"] <= since)

    # ------------------------------------------------------------------ commits

    def _write(
        self, files: Sequence[AddedFile], mode: str, version: int, schema: pa.Schema | None = None
    ) -> None:
        actions: list[AddAction | RemoveAction] = [_add(file) for file in files]
        properties = self._properties(version)

        def commit(delta: DeltaTable) -> None:
            if delta.transaction_version(self.application) != version:
                columns = delta.schema() if schema is None else DeltaSchema.from_arrow(schema)
                delta.create_write_transaction(actions, mode, columns, commit_properties=properties)

        self._attempt("commit to a Delta table", commit)

    def _attempt(self, attempted: str, commit: Any) -> None:
        backoff = Backoff(COMMIT_ATTEMPTS_MAX - 1, first_s=0.01)
        while True:
            delta = self._current()
            assert delta is not None, "only of an existing table"
            try:
                commit(delta)
            except CommitFailedError as error:
                # Somebody else committed first, or this commit did happen: look again.
                backoff, wait_s = backoff.after_failure()
                if wait_s is None:
                    raise self._refused(attempted, error) from error
                time.sleep(wait_s)
            except (DeltaError, OSError) as error:
                raise self._refused(attempted, error) from error
            else:
                self._current()
                return

    def _allow(self, schema: pa.Schema) -> None:
        """Let the table have columns of timestamps without zone, if `schema` does."""

        def commit(delta: DeltaTable) -> None:
            if "timestampNtz" not in (delta.protocol().reader_features or ()):
                delta.alter.add_feature(
                    TableFeatures.TimestampWithoutTimezone, allow_protocol_versions_increase=True
                )

        if any("timestamp_ntz" in str(field.type) for field in DeltaSchema.from_arrow(schema).fields):
            self._attempt("allow a type in a Delta table", commit)

    def _keep_statistics(self, schema: pa.Schema) -> None:
        """Name the new columns in the property that says of which there are statistics."""
        wanted = {
            name: value for name, value in _configuration(schema).items() if name in _STATISTICS_PROPERTIES
        }

        def commit(delta: DeltaTable) -> None:
            have = delta.metadata().configuration
            if any(have.get(name) != value for name, value in wanted.items()):
                _set_properties(delta, self.path, wanted)

        self._attempt("set a Delta table's properties", commit)

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
        except TableNotFoundError:
            self._delta = None
        except (DeltaError, OSError) as error:
            self._delta = None
            raise self._refused("read a Delta table", error, _UNREADABLE) from error
        return self._delta

    def _refused(self, attempted: str, error: Exception, hint: str = _UNWRITABLE) -> TailraceError:
        # delta-rs's messages speak of files, columns and versions, never of rows.
        found = str(error).splitlines()[0] if str(error) else type(error).__name__
        return TailraceError(
            Kind.SINK_WRITE_FAILED,
            f"{attempted}: {found}",
            hint,
            self.context,
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


def _set_properties(delta: DeltaTable, path: Path, wanted: dict[str, str]) -> None:
    """Give the table properties, in the commit after `delta`'s version.

    Not by delta-rs: a table with features gets others from it then, `variantType` among them, which
    no column needs and many readers lack (seen with 1.6.6).

    :raises CommitFailedError: if somebody else made that commit.
    """
    metadata = delta.metadata()
    actions: list[dict[str, Any]] = [
        {
            "commitInfo": {
                "timestamp": int(time.time() * 1000),
                "operation": "SET TBLPROPERTIES",
                "operationParameters": {"properties": json.dumps(wanted)},
            }
        },
        {
            "metaData": {
                "id": str(metadata.id),
                "name": metadata.name,
                "description": metadata.description,
                "format": {"provider": "parquet", "options": {}},
                "schemaString": delta.schema().to_json(),
                "partitionColumns": metadata.partition_columns,
                "createdTime": metadata.created_time,
                "configuration": {**metadata.configuration, **wanted},
            }
        },
    ]
    log = path / "_delta_log"
    temporary = log / f".{os.urandom(6).hex()}.tmp"
    try:
        temporary.write_text("\n".join(map(json.dumps, actions)) + "\n", "utf-8")
        os.link(temporary, log / f"{delta.version() + 1:020d}.json")
    except FileExistsError as error:
        raise CommitFailedError("another writer committed first") from error
    finally:
        temporary.unlink(missing_ok=True)


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
