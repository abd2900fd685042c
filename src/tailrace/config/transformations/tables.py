"""Checks that a sink of tables supports its transformations: those that map a table to a table.

A table has rows of columns. It has no headers, its key consists of columns of its rows, and a change stays a
change of its row. A mirror, moreover, is the table's current state: a transformation is refused if the mirror
could then differ from the transformed rows of the source's table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from tailrace.config.engine import EngineConfig
from tailrace.config.problems import ConfigProblem, Path
from tailrace.config.sections import DeltaSinkConfig
from tailrace.config.sinks import FolderSink
from tailrace.config.transformations.options import (
    AddFieldsConfig,
    DropHeadersConfig,
    ExtractFieldConfig,
    FieldsFromHeadersConfig,
    FilterConfig,
    FlattenConfig,
    HoistFieldConfig,
    OutboxConfig,
    Route,
    SetHeadersConfig,
    ThirdParty,
    ValueToKeyConfig,
)
from tailrace.config.transformations.predicates import (
    AnyPredicate,
    ExpressionPredicate,
    HeaderPredicate,
    TablePredicate,
    ThirdPartyPredicate,
    TombstonePredicate,
    TopicPredicate,
)
from tailrace.config.transformations.steps import ROOTS, TransformationConfig

_NO_HEADERS = "a table has no headers; add_fields adds columns with metadata of a change"
_NO_KEY = "a table's key consists of columns of its rows"
_SENSELESS: dict[type[TransformationConfig], str] = {
    FlattenConfig: "rows of a table are flat already, and the column `_op` has the operation",
    OutboxConfig: "events of an outbox are sent to topics; the outbox table can be written as any other",
    SetHeadersConfig: _NO_HEADERS,
    DropHeadersConfig: _NO_HEADERS,
    FieldsFromHeadersConfig: _NO_HEADERS,
    ValueToKeyConfig: f"{_NO_KEY}; source.message_keys chooses them",
    ExtractFieldConfig: _NO_KEY,
    HoistFieldConfig: _NO_KEY,
    ThirdParty: "a table's columns must depend on the table alone, which can't be known of other packages",
}
#: Metadata that is not a single value.
_LISTS = frozenset({"unchanged", "special"})


def refusals(config: EngineConfig) -> list[ConfigProblem]:
    """Return a problem for each transformation, of a sink or the file, that a sink of tables can't apply."""
    found: dict[tuple[Path, str], ConfigProblem] = {}
    for number, sink in enumerate(config.sinks):
        if not isinstance(sink, FolderSink):
            continue
        of_sink = f"for the sink {sink.name!r}: "
        own: Path = ("sinks", number)
        predicates = {**config.predicates, **sink.predicates}
        for place, steps, words in (((), config.transformations, of_sink), (own, sink.transformations, "")):
            for at, step in enumerate(steps):
                for message in _refused(step, predicates, sink):
                    path = (*place, "transformations", at)
                    if words:
                        message += "; move it to the other sinks, each in its own list"  # noqa: PLW2901
                    found.setdefault((path, message), ConfigProblem(path, words + message))
    return list(found.values())


def _refused(
    step: TransformationConfig, predicates: Mapping[str, AnyPredicate], sink: FolderSink
) -> Iterator[str]:
    senseless = _SENSELESS.get(type(step))
    if senseless is not None:
        yield f"can't be done to a table: {senseless}"
        return
    if getattr(step, "apply_to", "") == "key":
        yield f"can't be done to a table's key alone: {_NO_KEY}: leave apply_to out"
    if isinstance(step, Route) and step.key_field is not None:
        yield (
            "can't be done to a table: key_field: to distinguish rows of several tables, add a column with "
            "the metadata `table` by add_fields"
        )
    if isinstance(step, AddFieldsConfig) and _LISTS & {
        name.removeprefix("source.") for name in step.metadata.values()
    }:
        yield "can't be done to a table: `unchanged` and `special` have columns of their own already"
    predicate = predicates.get(step.predicate) if step.predicate is not None else None
    if isinstance(predicate, HeaderPredicate | TombstonePredicate | ThirdPartyPredicate):
        yield (
            "can't be done to a table: its predicate is another package's, or one of headers or tombstones, "
            "which changes of tables do not have"
        )
    for text in _expressions(step, predicate):
        if roots := {path[0] for _, path, _ in _inputs(text)} & {"headers", "value"}:
            yield f"can't be done to a table: changes of tables have no {' and no '.join(sorted(roots))}"
    if isinstance(sink, DeltaSinkConfig) and sink.mode == "mirror":
        yield from _refused_by_mirror(step, predicate, sink)


def _refused_by_mirror(
    step: TransformationConfig, predicate: AnyPredicate | None, sink: DeltaSinkConfig
) -> Iterator[str]:
    if isinstance(step, FilterConfig):
        yield (
            "can't be done to a mirror: if a later change of a row is dropped, the mirror keeps the old row; "
            "exclude tables with the sink's `tables`, or filter in queries of the mirror"
        )
        return
    if isinstance(step, Route):
        yield "can't be done to a mirror: its tables are those of the source; mode: append supports it"
    if predicate is not None and not isinstance(predicate, TablePredicate | TopicPredicate):
        yield (
            "can't be done to a mirror: its predicate chooses single changes, but a row of a mirror must not "
            "depend on which change wrote it; use a predicate of tables or topics"
        )
    if not isinstance(step, AddFieldsConfig):
        return
    if sink.keyless == "full_row" and (step.metadata or step.computed):
        yield (
            "can't be done to a mirror with keyless: full_row: all columns together identify a row, and a "
            "delete does not have the values of the added ones"
        )
    for text in step.computed.values():
        if any(path[0] == "before" or kind == "was_sent" for kind, path, _ in _inputs(text)):
            yield "can't be done to a mirror: `before` and `was_sent` depend on the change; use `after`"


def _expressions(step: TransformationConfig, predicate: AnyPredicate | None) -> Iterator[str]:
    if isinstance(step, FilterConfig):
        yield step.where
    if isinstance(step, Route) and step.topic is not None:
        yield step.topic
    if isinstance(step, AddFieldsConfig):
        yield from step.computed.values()
    if isinstance(predicate, ExpressionPredicate):
        yield predicate.where


def _inputs(text: str) -> Iterable[tuple[str, tuple[str, ...], int]]:
    from tailrace.expressions.sql import inputs_of  # loads DuckDB

    return inputs_of(text, ROOTS)
