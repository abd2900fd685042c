"""Checks which transformations a sink of tables supports: those that map a table to a table.

A table has rows of columns. It has no headers, its key is columns of its rows, and a change stays a change
of its row. A mirror is the table's present state, besides: what would leave in it rows that the source's
table does not give is refused.
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

_NO_HEADERS = "a table has no headers; add_fields makes columns of what is known of a change"
_NO_KEY = "a table's key is columns of its rows: there is none beside them"
_SENSELESS: dict[type[TransformationConfig], str] = {
    FlattenConfig: "rows of a table are flat already, and `_op` says what was done to them",
    OutboxConfig: "events of an outbox go to topics; the outbox table itself can be written as any other",
    SetHeadersConfig: _NO_HEADERS,
    DropHeadersConfig: _NO_HEADERS,
    FieldsFromHeadersConfig: _NO_HEADERS,
    ValueToKeyConfig: f"{_NO_KEY}; source.message_keys chooses them",
    ExtractFieldConfig: _NO_KEY,
    HoistFieldConfig: _NO_KEY,
    ThirdParty: "a table's columns must follow from the table alone, which is not known of another package's",
}
#: Metadata that is no single value.
_LISTS = frozenset({"unchanged", "special"})


def refusals(config: EngineConfig) -> list[ConfigProblem]:
    """Return what of the transformations of sinks, and of the pipeline for them, sinks of tables can't do."""
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
                        message += "; give it to the sinks that it is for, each in its own list"  # noqa: PLW2901
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
            "can't be done to a table: key_field: rows of several tables stay apart by a column that "
            "add_fields makes of the metadata `table`"
        )
    if isinstance(step, AddFieldsConfig) and _LISTS & {
        name.removeprefix("source.") for name in step.metadata.values()
    }:
        yield "can't be done to a table: `unchanged` and `special` stand in columns of their own already"
    predicate = predicates.get(step.predicate) if step.predicate is not None else None
    if isinstance(predicate, HeaderPredicate | TombstonePredicate | ThirdPartyPredicate):
        yield (
            "can't be done to a table: its predicate asks for headers or tombstones, which changes of tables "
            "do not have, or is another package's"
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
            "can't be done to a mirror: a row whose later change is dropped would stay in it as it was; "
            "leave tables out with the sink's `tables`, or filter where the mirror is read"
        )
        return
    if isinstance(step, Route):
        yield "can't be done to a mirror: its tables are those of the source; mode: append takes it"
    if predicate is not None and not isinstance(predicate, TablePredicate | TopicPredicate):
        yield (
            "can't be done to a mirror: its predicate chooses single changes, and a row of a mirror has to "
            "be the same whichever change brought it; predicates of tables and topics can be used"
        )
    if not isinstance(step, AddFieldsConfig):
        return
    if sink.keyless == "full_row" and (step.metadata or step.computed):
        yield (
            "can't be done to a mirror with keyless: full_row: rows are told apart by all of their columns, "
            "and a delete does not give these again"
        )
    for text in step.computed.values():
        if any(path[0] == "before" or kind == "was_sent" for kind, path, _ in _inputs(text)):
            yield "can't be done to a mirror: `before` and `was_sent` say how a row came to be; take `after`"


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
