"""One Delta table on the driver: creates, extends and replaces it by commits of delta-rs.

Each commit has a transaction (application id, version): the log, pipeline, table and task, and
the log offset up to which the table then has everything. Delta stores it with the table, and
refuses a commit if another writer has changed the transaction since, so two engines can't both
commit a range, even if a lock has no effect.

If the outcome of a commit is unknown, it is looked up before any repetition.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import urllib.parse
from collections.abc import Iterator, Sequence
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
from tailrace.sinks.delta.evolution import held_columns, same_type
from tailrace.sinks.delta.key_bounds import NOTHING
from tailrace.sinks.target import MAKE_ROOM, is_without_room

#: Delta's features with which a table's data files have exactly the table's rows.
_PLAIN_FEATURES = frozenset({"timestampNtz"})
#: The first one has precedence.
_STATISTICS_PROPERTIES = ("delta.dataSkippingStatsColumns", "delta.dataSkippingNumIndexedCols")

#: Most attempts of a commit while others (OPTIMIZE, VACUUM, a user) commit to the table.
COMMIT_ATTEMPTS_MAX = 8
#: Most columns with statistics: Delta's default.
_STATISTICS_COLUMNS_MAX = 32
#: Most digits of a decimal with statistics: delta-rs writes bounds as doubles, which hold so many exactly.
_STATISTICS_DIGITS_MAX = 15
_UNWRITABLE = "check the table's folder; what was committed is known and will not be written again"
_ELSEWHERE = "give the sink a new, empty path and let it read the log from its start"
#: How a user takes back what was given to a table, if that can be done.
_WAYS_BACK = {
    "delta.appendOnly": "remove it (ALTER TABLE … UNSET TBLPROPERTIES ('delta.appendOnly')), or ",
    "partitions": "rewrite it without partitions, or ",
    "CHECK constraints": "drop them (ALTER TABLE … DROP CONSTRAINT …), or ",
}
_UNREADABLE = (
    "check the table's folder. After a loss of power its last commits may be half-written: remove the first "
    "file _delta_log/<version>.json that can't be read, and all later ones, their checkpoints "
    "(<version>.checkpoint.parquet) and _delta_log/_last_checkpoint; their content is written again"
)
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class AddedFile:
    """A data file in the table's folder, to be added to the table."""

    name: str
    rows: int
    bytes: int
    facts: dict[str, Any]


class DeltaFolder:
    """The Delta table in one folder, whether or not it exists yet.

    `table` is its name for messages; `application` is the application id of its transactions.
    """

    def __init__(self, path: Path, sink: str, table: str, application: str) -> None:
        self.path = path
        self.sink = sink
        self.table = table
        self.application = application
        self.context = {"sink": sink, "table": table}
        self._delta: DeltaTable | None = None
        self._committed: int | None = None  # as it was last read by `committed`, or written
        self._relation = -2, 0  # the table's version, and its relation then: each range asks for all tables'
        self._durable = -1  # the table's version up to which all commits are on disk

    def committed(self) -> int | None:
        """Return the log offset up to which the table has everything; None: nothing.

        Read again from the table. None, too, for a table that is not this pipeline's.

        :raises TailraceError: `SINK_WRITE_FAILED` if it can't be read.
        """
        self._current()
        self._committed = self._transaction()
        return self._committed

    def _transaction(self) -> int | None:
        try:
            return None if self._delta is None else self._delta.transaction_version(self.application)
        except (DeltaError, OSError) as error:  # it was created again
            self._delta = None
            raise self._refused("read a Delta table", error, _UNREADABLE) from error

    def require_ours(self, *, is_mirror: bool) -> None:
        """Check that the table, if there is one, was made for this pipeline and log, and is one to which
        our files can be added as they are, and from which a mirror can remove rows.

        :raises TailraceError: `SINK_FOREIGN`, `SINK_SCHEMA_REFUSED`.
        """
        if self._delta is None:
            return
        if self._transaction() is None:
            raise TailraceError(
                Kind.SINK_FOREIGN,
                "write to a Delta table: it has no record of this pipeline and log",
                "another writer created it, or created it again: move the table away, or give the sink "
                "its own path",
                self.context,
            )
        metadata = self._delta.metadata()
        properties = metadata.configuration
        # delta-rs drops a mapping when it writes a schema: nobody can read the table then. Partition columns
        # are read from Delta's log, not from our files. No constraint is checked when files are committed.
        found = {
            "a column mapping": properties.get("delta.columnMapping.mode", "none") != "none",
            "partitions": bool(metadata.partition_columns),
            "CHECK constraints": any(name.startswith("delta.constraints.") for name in properties),
            "delta.appendOnly": is_mirror and properties.get("delta.appendOnly") == "true",
        }
        if given := [name for name, is_there in found.items() if is_there]:
            raise TailraceError(
                Kind.SINK_SCHEMA_REFUSED,
                f"write to a Delta table: it was given {given[0]}",
                f"{_WAYS_BACK.get(given[0], '')}{_ELSEWHERE}",
                self.context,
            )

    def exists(self) -> bool:
        """Return whether the table existed when it was last read."""
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
        """Return the highest value of a column of whole numbers, from the files' statistics; None
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
        """Return the oid of the relation whose rows the table has, from its columns; 0: not known."""
        if self._delta is None:
            self._current()
        version = -1 if self._delta is None else self._delta.version()
        if self._relation[0] != version:
            found = max((column.relation for column in held_columns(self.schema())), default=0)
            self._relation = version, found
        return self._relation[1]

    def data_files(self) -> list[str]:
        """Return the paths of the table's data files, which have exactly the table's rows.

        :raises TailraceError: `SINK_SCHEMA_REFUSED` if the table has features with which that is not so.
        """
        assert self._delta is not None, "only of an existing table"
        foreign = set(self._delta.protocol().reader_features or ()) - _PLAIN_FEATURES
        if foreign:
            raise TailraceError(
                Kind.SINK_SCHEMA_REFUSED,
                "follow a change of schema: the table was given features that its files can't be rewritten "
                f"with ({', '.join(sorted(foreign))})",
                # DROP FEATURE leaves `checkpointProtection`, which delta-rs can't write either.
                _ELSEWHERE,
                self.context,
            )
        added = pa.table(self._delta.get_add_actions(flatten=True))
        paths = added["path"].to_pylist() if len(added) else []
        return [str(self.path / urllib.parse.unquote(path)) for path in paths]

    def add_columns(self, fields: Sequence[pa.Field]) -> None:
        """Add those of these columns that the table lacks, in a separate commit.

        Idempotent. Existing rows have NULL in them.

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
        """Return those of `schema`'s columns, all of which the table has, whose metadata the table lacks.

        The table's columns may have more, such as a user's comment.
        """
        have = {field.name: field.metadata or {} for field in self.schema()}
        return [field for field in schema if not (field.metadata or {}).items() <= have[field.name].items()]

    def has_columns(self, schema: pa.Schema) -> bool:
        """Return whether the table has `schema`'s columns, with their types and metadata, and no others."""
        have = self.schema()
        return (
            set(have.names) == set(schema.names)
            and all(same_type(have.field(field.name).type, field.type) for field in schema)
            and not self.unnoted(schema)
        )

    def note_columns(self, schema: pa.Schema) -> None:
        """Store the metadata of `schema`'s columns in the table's, where it differs.

        A change of a column's type may leave its values as they are; the next change begins from that type.

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
        """Replace the table's content by `files`, the same rows with another schema.

        One commit, which does not change the table's transaction.

        :raises TailraceError: `SINK_WRITE_FAILED`, also if another writer committed since the
            table's files were read: nothing has changed then.
        """
        delta = self._delta
        assert delta is not None, "only of an existing table"
        read, before = delta.version(), self.schema()
        allowed = self._allow(schema)
        if (delta := self._delta) is None or delta.version() != read + allowed:
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
        self._keep_statistics(before, schema)

    def create(self, schema: pa.Schema, files: Sequence[AddedFile], version: int) -> None:
        """Create the table with its first files, in one commit.

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
        self._committed = version

    def append(self, files: Sequence[AddedFile], version: int) -> None:
        """Add files and move the table's transaction to `version`, in one commit.

        :raises TailraceError: `SINK_WRITE_FAILED`; `SINK_FOREIGN` if it was moved since `committed`.
        """
        self._write(files, "append", version)

    def replace(self, files: Sequence[AddedFile], version: int, schema: pa.Schema) -> None:
        """Replace the table's content by `files` and its columns by `schema`, in one commit.

        :raises TailraceError: as `append`.
        """
        before = self.schema()
        self._allow(schema)
        self._write(files, "overwrite", version, schema)
        self._keep_statistics(before, schema)

    def make_durable(self, since: int) -> int:
        """Put the table's commits since its transaction was at `since`, and their files, on disk.
        Return where its transaction is.

        Neither delta-rs nor Spark does this, and the sink's position must not survive a commit that is lost.
        The commits may be those of a process that died before it put them on disk.
        """
        log = self.path / "_delta_log"
        delta = self._current()
        assert delta is not None, "only after a commit"
        committed = self._transaction() or 0
        if delta.version() == self._durable:
            return committed
        for version, actions in self._commits(delta.version(), since):
            commit = log / f"{version:020d}.json"
            with contextlib.suppress(FileNotFoundError):  # few versions have one; it replaces older commits
                sync_file(log / f"{version:020d}.checkpoint.parquet")
                sync_file(log / "_last_checkpoint")
            for file, _ in self._files_of(actions):
                with contextlib.suppress(FileNotFoundError):  # it was replaced, and VACUUM removed it
                    sync_file(file)
            sync_file(commit)
        above = [self.path.parent] if self._durable < 0 else []  # the table's own name, once
        for directory in (log, self.path, *above, self.path / "_change_data"):
            with contextlib.suppress(FileNotFoundError):  # without a change data feed
                durable.sync_directory(directory)
        self._durable = delta.version()
        return committed

    def require_whole(self, since: int) -> None:
        """Check the table's commits since its transaction was at `since`, which may not have been on disk
        when the machine lost power.

        :raises TailraceError: `SINK_DAMAGED` if one of them, or of their files, lacks its end.
        """
        delta = self._current()
        assert delta is not None, "only after a commit"
        for version, actions in self._commits(delta.version(), since):
            sizes = [(file, size) for file, size in self._files_of(actions) if size is not None]
            if not actions or any(file.exists() and file.stat().st_size != size for file, size in sizes):
                raise self._cut_off(version)

    def _commits(self, version: int, since: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Yield the actions of each commit that is not on disk for certain, the last one first."""
        for number in range(version, self._durable, -1):
            commit = self.path / "_delta_log" / f"{number:020d}.json"
            try:
                # Not `splitlines`: a table's statistics may contain U+2028, which JSON does not escape.
                actions = [json.loads(line) for line in commit.read_bytes().split(b"\n") if line]
            except FileNotFoundError:
                return  # Delta has removed this old commit: a checkpoint has its content
            except ValueError:
                raise self._cut_off(number) from None
            yield number, actions
            if any(self._is_up_to(action, since) for action in actions):
                return

    def _files_of(self, actions: Sequence[dict[str, Any]]) -> list[tuple[Path, int | None]]:
        """Return the files that a commit added, with their sizes as far as they are known: of rows, of the
        change data feed, and deletion vectors.
        """
        found = [action[kind] for action in actions for kind in ("add", "cdc") if kind in action]
        files = [(self.path / urllib.parse.unquote(each["path"]), each.get("size")) for each in found]
        # Their names are encoded in the commit: those of other commits are synced once more.
        vectors = any(each.get("deletionVector") for each in found)
        return [*files, *((file, None) for file in self.path.rglob("deletion_vector_*.bin") if vectors)]

    def _cut_off(self, version: int) -> TailraceError:
        return TailraceError(
            Kind.SINK_DAMAGED,
            f"read a Delta table's last commits: version {version}, or a file of it, lacks its end, as after "
            "a loss of power",
            f"stop the pipeline and remove _delta_log/<version>.json of version {version} and of later ones, "
            "their checkpoints (<version>.checkpoint.parquet) and _delta_log/_last_checkpoint: their content "
            "is written again",
            self.context,
        )

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
            found = self._transaction()
            if found != version:
                if found != self._committed:
                    raise TailraceError(
                        Kind.SINK_FOREIGN,
                        "commit to a Delta table: another commit of this pipeline was made meanwhile",
                        "another engine writes to this target: stop one of them",
                        self.context,
                    )
                columns = delta.schema() if schema is None else DeltaSchema.from_arrow(schema)
                delta.create_write_transaction(actions, mode, columns, commit_properties=properties)

        self._attempt("commit to a Delta table", commit)
        self._committed = version

    def _attempt(self, attempted: str, commit: Any) -> None:
        backoff = Backoff(COMMIT_ATTEMPTS_MAX - 1, first_s=0.01)
        while True:
            delta = self._current()
            assert delta is not None, "only of an existing table"
            try:
                commit(delta)
            except CommitFailedError as error:
                # Another writer committed first, or this commit did happen: read the table again.
                refused = self._refused(attempted, error)
                backoff, wait_s = backoff.after(refused)
                if wait_s is None:
                    raise refused from error
                time.sleep(wait_s)
            except (DeltaError, OSError) as error:
                raise self._refused(attempted, error) from error
            else:
                self._current()
                return

    def _allow(self, schema: pa.Schema) -> bool:
        """Enable Delta's feature for timestamps without zone, if `schema` has such columns; return whether
        this took a commit.
        """
        allowed = False

        def commit(delta: DeltaTable) -> None:
            nonlocal allowed
            if "timestampNtz" not in (delta.protocol().reader_features or ()):
                delta.alter.add_feature(
                    TableFeatures.TimestampWithoutTimezone, allow_protocol_versions_increase=True
                )
                allowed = True

        if any("timestamp_ntz" in str(field.type) for field in DeltaSchema.from_arrow(schema).fields):
            self._attempt("allow a type in a Delta table", commit)
        return allowed

    def _keep_statistics(self, before: pa.Schema, schema: pa.Schema) -> None:
        """Change the property with the columns that have statistics, unless a user has set it.

        :param before: the columns of the table until now; `schema`: the present ones.
        """
        made, wanted = _statistics(before), _statistics(schema)

        def commit(delta: DeltaTable) -> None:
            known = delta.metadata().configuration
            have = next(((name, known[name]) for name in _STATISTICS_PROPERTIES if name in known), ("", ""))
            columns = have[1].replace("`", "").split(",") if have[0] == _STATISTICS_PROPERTIES[0] else []
            # Writers refuse a name that is no column's, also if a user set it.
            if have != wanted and (have == made or not set(columns) <= set(schema.names)):
                _set_properties(delta, self.path, dict([wanted]))

        self._attempt("set a Delta table's properties", commit)

    def _properties(self, version: int) -> CommitProperties:
        transaction = Transaction(self.application, version)
        return CommitProperties(app_transactions=[transaction], max_commit_retries=1)

    def _current(self) -> DeltaTable | None:
        try:
            if not (self.path / "_delta_log").is_dir():
                self._delta = None
            elif self._delta is not None:
                self._delta.update_incremental()
            else:
                self._delta, self._durable = DeltaTable(str(self.path)), -1  # it may be another one
        except TableNotFoundError:
            self._delta = None
        except (DeltaError, OSError) as error:
            self._delta = None
            raise self._refused("read a Delta table", error, _UNREADABLE) from error
        return self._delta

    def _refused(self, attempted: str, error: Exception, hint: str = _UNWRITABLE) -> TailraceError:
        # delta-rs's messages name files, columns and versions, never values of rows. Causes are later lines.
        found = " ".join(re.sub(r"\x1b\[\d*m", "", str(error)).split()).replace(" ↳", ":")
        kind, hint = kind_of(error, hint)
        return TailraceError(kind, f"{attempted}: {found or type(error).__name__}", hint, self.context)


def kind_of(error: Exception, hint: str) -> tuple[Kind, str]:
    """Return the kind of an error of delta-rs, and its hint.

    :param hint: for errors whose cause is not known.
    """
    if is_without_room(error):
        return Kind.SINK_WRITE_FAILED, MAKE_ROOM
    if "Delta table is append-only" in str(error):  # a history is rewritten for another type
        return Kind.SINK_SCHEMA_REFUSED, f"{_WAYS_BACK['delta.appendOnly']}{_ELSEWHERE}"
    if "Unsupported table features" in str(error):  # no repetition would succeed
        return Kind.SINK_SCHEMA_REFUSED, f"it was given features that delta-rs can't write: {_ELSEWHERE}"
    return Kind.SINK_WRITE_FAILED, hint


def _configuration(schema: pa.Schema) -> dict[str, str]:
    """Return the properties of a new table."""
    # With one commit per second the table's log gets one file per second; a day of them is kept.
    return {"delta.logRetentionDuration": "interval 1 days", **dict([_statistics(schema)])}


def _statistics(schema: pa.Schema) -> tuple[str, str]:
    """Return the property with the columns that have statistics, and its value.

    Only whole numbers, decimals of few digits and texts have statistics. A bound of a date or time may be
    outside of the years 1 to 9999 (PostgreSQL's infinity is), and some readers, such as deltalake,
    can't open a table with such statistics. A rounded bound would hide rows from queries.
    """
    names = [
        field.name
        for field in schema
        if _PLAIN_NAME.fullmatch(field.name)
        and (
            pa.types.is_integer(field.type)
            or (pa.types.is_decimal(field.type) and field.type.precision <= _STATISTICS_DIGITS_MAX)
            or pa.types.is_string(field.type)
        )
    ][:_STATISTICS_COLUMNS_MAX]
    of_names, of_number = _STATISTICS_PROPERTIES
    return (of_names, ",".join(names)) if names else (of_number, "0")


def _set_properties(delta: DeltaTable, path: Path, wanted: dict[str, str]) -> None:
    """Set properties of the table, in the commit after `delta`'s version.

    Not by delta-rs: for a table with features it adds others, such as `variantType`, which no column
    needs and many readers lack (seen with 1.6.6).

    :raises CommitFailedError: if another writer made that commit.
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
