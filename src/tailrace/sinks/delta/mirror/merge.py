"""The MERGE of net changes into a mirror: its statement for any SQL engine, and its execution by Spark, in
one commit with the table's transaction.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.errors import Kind, TailraceError
from tailrace.sinks.contract import required
from tailrace.sinks.delta.folder import DeltaFolder
from tailrace.sinks.delta.mirror.files import POSITION
from tailrace.sinks.delta.mirror.net_changes import UPSERT
from tailrace.spark.jobs import IN_CAUSE

if TYPE_CHECKING:
    from delta.tables import DeltaTable
    from pyspark.sql import Column, DataFrame, SparkSession

_SETTINGS = {
    # The source is files that do not change, so they need not be copied first.
    "spark.databricks.delta.merge.materializeSource": "none",
    # Spark's default, INT96, has nanoseconds: years before 1677 and after 2262 overflow.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Days before 1582 are in the proleptic Gregorian calendar, as in PostgreSQL and Parquet.
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
}

#: Characters with a special meaning in a path that Spark reads.
_PATTERN = re.compile(r"[\\{}\[\]*?]")

_NONE: Mapping[str, str] = {}
_EMPTY = "cast(map() as map<string,string>)"


@dataclass(frozen=True, slots=True)
class NetSource:
    """Net changes to merge: one event per key, in the files at `paths`; `bytes` is their size in memory.

    `open`: columns whose value some events take from the target's row. `moved`: some of these rows have
    another key in the target. `texts`: key columns whose values may need PostgreSQL's text to be
    distinguished. `null_keys`: some key column has NULL. `special`: some rows have special texts.
    """

    paths: tuple[str, ...]
    rows: int
    bytes: int
    columns: tuple[str, ...]
    key: tuple[str, ...]
    open: frozenset[str]
    moved: bool
    texts: tuple[str, ...]
    null_keys: bool
    special: bool


@dataclass(frozen=True, slots=True)
class Dialect:
    """An SQL engine's expressions for a MERGE of net changes `s` into the mirror `t`.

    :param quoted: returns a column's name, quoted.
    :param log_offset: returns the guard of a side.
    :param is_left: returns the condition that a change does not change a column.
    """

    quoted: Callable[[str], str]
    log_offset: Callable[[str], str]
    is_left: Callable[[str], str]


@dataclass(frozen=True, slots=True)
class MergeStatement:
    """The clauses of a MERGE, for rows with a change's key and for changes whose key no row has.

    `updates` and `inserts` are values by column, including `_position`, with unquoted names.
    """

    delete_if: str
    update_if: str
    updates: dict[str, str]
    insert_if: str
    inserts: dict[str, str]


def statement(source: NetSource, sql: Dialect, updated: str, inserted: str) -> MergeStatement:
    """Return the MERGE of `source`. A change that is not newer than the row, by its guard, has no effect.

    :param updated: the `_position` of an updated row, and `inserted`, of an inserted one.
    """

    def given(name: str) -> str:
        return f"s.{sql.quoted(name)}"

    def stays_or_given(name: str) -> str:
        return f"case when {sql.is_left(name)} then t.{sql.quoted(name)} else {given(name)} end"

    newer = f"{sql.log_offset('s')} > {sql.log_offset('t')}"
    upsert = given(UPSERT)
    updates = {name: (stays_or_given if name in source.open else given)(name) for name in source.columns}
    inserts = {name: given(name) for name in source.columns}
    return MergeStatement(
        f"not {upsert} and {newer}",
        f"{upsert} and {newer}",
        {**updates, POSITION: updated},
        upsert,
        {**inserts, POSITION: inserted},
    )


def merge(spark: SparkSession | None, folder: DeltaFolder, source: NetSource, version: int) -> None:
    """Merge `source` into the table and move its transaction to `version`, in one commit.

    :raises TailraceError: `SPARK_FAILED` if nothing was committed.
    """
    with committing(spark, folder, version) as (session, target):
        changes = _read(session, source)
        if source.moved:
            changes = _with_old_values(session, changes, target.toDF(), source)
        updated = inserted = "s._position"
        if source.open:
            # An unchanged value keeps its text; a value that was never sent stays marked as unknown.
            updated = _position(_joint(_texts_kept("t"), _texts("s")))
            inserted = _position(_joint(_marks(), _texts("s")))
        found = statement(source, _SPARK, updated, inserted)
        (
            target.alias("t")
            .merge(changes.alias("s"), same_key(source, maps_of(changes)))
            .whenMatchedDelete(found.delete_if)
            .whenMatchedUpdate(found.update_if, _by_quoted(found.updates))
            .whenNotMatchedInsert(found.insert_if, _by_quoted(found.inserts))
            .execute()
        )


def _by_quoted(values: Mapping[str, str]) -> dict[str, str | Column]:
    return {quoted(name): value for name, value in values.items()}


def remove_unread(spark: SparkSession | None, folder: DeltaFolder, offset: int) -> None:
    """Remove the rows that were neither read nor changed at the log offset `offset` or later. Idempotent;
    does not change the table's transaction.

    :raises TailraceError: `SPARK_FAILED`.
    """
    from delta.tables import DeltaTable
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        DeltaTable.forPath(_session(spark), str(folder.path)).delete(f"_position.log_offset < {offset}")
    except (PySparkException, Py4JError) as error:
        raise _failed(error, folder) from error


@contextlib.contextmanager
def committing(
    spark: SparkSession | None, folder: DeltaFolder, version: int
) -> Iterator[tuple[SparkSession, DeltaTable]]:
    """Return a context with a session whose single commit to the table includes its transaction.

    :raises TailraceError: `SPARK_FAILED` if the body failed and nothing was committed.
    """
    from delta.tables import DeltaTable
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    transaction = {
        "spark.databricks.delta.write.txnAppId": folder.application,
        "spark.databricks.delta.write.txnVersion": str(version),
    }
    session = _session(spark, transaction)
    try:
        yield session, DeltaTable.forPath(session, str(folder.path))
    except (PySparkException, Py4JError) as error:
        # It may have been committed nevertheless, so the table is read.
        if folder.committed() != version:
            raise _failed(error, folder) from error


def _session(spark: SparkSession | None, transaction: Mapping[str, str] = _NONE) -> SparkSession:
    # A separate session: the transaction is a setting, and tables are merged in parallel.
    session = required(spark).newSession()
    for name, value in {**_SETTINGS, **transaction}.items():
        session.conf.set(name, value)
    return session


def quoted(name: str) -> str:
    """Return a column's name, quoted for Spark SQL."""
    return "`" + name.replace("`", "``") + "`"


def maps_of(rows: DataFrame) -> frozenset[str]:
    """Return the columns of maps."""
    return frozenset(field.name for field in rows.schema if field.dataType.typeName() == "map")


def comparable(column: str, name: str, maps: Collection[str]) -> str:
    """Return an expression for comparisons of a column: Spark can't compare maps."""
    return f"map_entries({column})" if name in maps else column


def equal(one: str, other: str, name: str, maps: Collection[str]) -> str:
    """Return the condition that two sides have the same value in a column, where NULL = NULL, NaN = NaN."""
    first, second = (comparable(f"{side}.{quoted(name)}", name, maps) for side in (one, other))
    return f"{first} <=> {second}"


def same_key(source: NetSource, maps: Collection[str] = ()) -> str:
    """Return the condition that a row and a change have the same key, where NULL = NULL and NaN = NaN.

    :param maps: columns of maps.
    """
    terms = [equal("t", "s", name, maps) for name in source.key]
    terms += [f"{_text('t', name)} <=> {_text('s', name)}" for name in source.texts]
    return " and ".join(terms)


def _text(side: str, name: str) -> str:
    return f"try_element_at({side}._position.special, {_literal(name)})"


def _literal(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def literal_path(path: str) -> str:
    """Return a path for Spark to read, with characters escaped that are patterns there, such as `[1]`."""
    return _PATTERN.sub(r"\\\g<0>", path)


def _read(session: SparkSession, source: NetSource) -> DataFrame:
    changes = session.read.option("mergeSchema", "true").parquet(*map(literal_path, source.paths))
    if "_upsert" not in changes.columns:
        return changes.selectExpr("*", "true as _upsert", "cast(array() as array<string>) as _unchanged")
    # Only some files have these columns: in the others, all events are complete rows.
    whole = [name for name in changes.columns if name not in ("_upsert", "_unchanged")]
    return changes.selectExpr(
        *(quoted(name) for name in whole),
        "coalesce(_upsert, true) as _upsert",
        "coalesce(_unchanged, cast(array() as array<string>)) as _unchanged",
    )


def _left(name: str) -> str:
    return f"array_contains(s._unchanged, {_literal(name)})"


def _texts(side: str) -> str:
    """Return a row's texts, from `_position.special`, never null."""
    return f"coalesce({side}._position.special, {_EMPTY})"


def _texts_kept(side: str) -> str:
    """Return those texts of the target's row whose columns the change did not change."""
    return f"map_filter({_texts(side)}, (k, v) -> array_contains(s._unchanged, k))"


def _marks() -> str:
    """Return texts, all null, that mark values that were never sent."""
    return "map_from_arrays(s._unchanged, transform(s._unchanged, n -> cast(null as string)))"


def _joint(first: str, second: str) -> str:
    return f"map_concat({first}, {second})"


def _position(special: str) -> str:
    return (
        "named_struct('log_offset', s._position.log_offset, "
        f"'special', case when size({special}) > 0 then {special} end)"
    )


_SPARK = Dialect(quoted, lambda side: f"{side}._position.log_offset", _left)


def _with_old_values(
    session: SparkSession, changes: DataFrame, target: DataFrame, source: NetSource
) -> DataFrame:
    """Return `changes` with the unchanged values of rows whose key changed, from the rows of their old keys.

    The target's rows before the merge are used (`_origin` is a key of theirs), so the result is
    written to a file before the merge begins.
    """
    from pyspark.sql.functions import expr

    origin = [equal("s._origin", "o", name, maps_of(changes)) for name in source.key]
    origin += [
        f"try_element_at(s._origin._special, {_literal(name)}) <=> {_text('o', name)}"
        for name in source.texts
    ]
    found = expr(" and ".join(["s._origin is not null", *origin]))
    joined = changes.alias("s").join(target.alias("o"), found, "left")
    moved = "s._origin is not null"
    columns = [
        expr(
            f"case when {moved} and {_left(name)} then o.{quoted(name)} else s.{quoted(name)} end"
            if name in source.open
            else f"s.{quoted(name)}"
        ).alias(name)
        for name in source.columns
    ]
    brought = _joint(
        f"case when o._position is null then {_marks()} else {_texts_kept('o')} end", _texts("s")
    )
    written = Path(source.paths[0]).with_name(f"moved-{Path(source.paths[0]).name}")
    joined.select(
        *columns,
        expr(f"case when {moved} then {_position(brought)} else s._position end").alias("_position"),
        expr("s._upsert").alias("_upsert"),
        expr(f"case when {moved} then cast(array() as array<string>) else s._unchanged end").alias(
            "_unchanged"
        ),
    ).write.parquet(str(written))
    return session.read.parquet(literal_path(str(written)))


def _failed(error: Exception, folder: DeltaFolder) -> TailraceError:
    # Spark's message may quote values; its name of the error does not.
    condition = getattr(error, "getCondition", lambda: None)() or type(error).__name__
    return TailraceError(
        Kind.SPARK_FAILED,
        f"merge changes into a mirror: {condition}",
        IN_CAUSE,
        {"sink": folder.sink, "table": folder.table},
    )
