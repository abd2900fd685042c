"""Builds a chain from the entries of a configuration file or of a program.

An entry is a mapping as in the file, a model of `config.transformations`, or an object that
implements `Transformation` or `RecordTransformation`; a predicate likewise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tailrace import extensions
from tailrace.config.fields import Section
from tailrace.config.problems import ConfigProblem, Path, from_pydantic
from tailrace.config.transformations import options, steps
from tailrace.config.transformations import predicates as choices
from tailrace.config.transformations.steps import ROOTS, python_regex
from tailrace.errors import Kind, TailraceError
from tailrace.expressions.computing import Expression
from tailrace.expressions.language import ExpressionError
from tailrace.transforms import flatten, headers, keys, outbox, routes, selection, timestamps
from tailrace.transforms.chain import Chain, Step
from tailrace.transforms.changed_keys import WithSplitUpdates
from tailrace.transforms.contract import Predicate, RecordTransformation, Transformation
from tailrace.transforms.groups import columns
from tailrace.transforms.groups.single_records import OneByOne

#: Entries of a list of transformations, and of a mapping of predicates.
TransformationLike = Transformation | RecordTransformation | steps.TransformationConfig | Mapping[str, Any]
PredicateLike = Predicate | Section | Mapping[str, Any]

_MADE: dict[type[steps.TransformationConfig], Callable[[Any], Transformation]] = {
    options.FilterConfig: selection.Filter.of,
    options.DropConfig: lambda _: selection.Drop(),
    options.Route: routes.Routing.of,
    options.RenameConfig: columns.Rename,
    options.DropFieldsConfig: columns.DropFields,
    options.MaskConfig: columns.Mask.of,
    options.AddFieldsConfig: columns.AddFields.of,
    options.CastConfig: columns.Cast.of,
    options.FlattenConfig: flatten.Flatten,
    options.OutboxConfig: outbox.Outbox,
    options.TimestampsConfig: timestamps.Timestamps,
    options.SetHeadersConfig: headers.SetHeaders.of,
    options.DropHeadersConfig: headers.DropHeaders,
    options.FieldsFromHeadersConfig: headers.FieldsFromHeaders,
    options.ValueToKeyConfig: keys.ValueToKey,
    options.ExtractFieldConfig: keys.ExtractField,
    options.HoistFieldConfig: keys.HoistField,
}
_CHOOSING: dict[type[Section], Callable[[Any], Predicate]] = {
    choices.TablePredicate: lambda given: selection.Tables(given.tables),
    choices.OperationPredicate: lambda given: selection.Operations(given.letters),
    choices.TopicPredicate: lambda given: selection.TopicChoice(python_regex(given.pattern)),
    choices.HeaderPredicate: lambda given: selection.HasHeader(given.name),
    choices.TombstonePredicate: lambda _: selection.Tombstones(),
    choices.ExpressionPredicate: lambda given: selection.Where(Expression(given.where, ROOTS), given.missing),
}


def build(
    transformations: Sequence[TransformationLike],
    predicates: Mapping[str, PredicateLike] | None = None,
    *,
    splits_updates: bool = False,
) -> Chain:
    """Return the chain of `transformations`, whose predicates are named in `predicates`.

    :param splits_updates: whether an update that changed the key becomes two records where its former key
        would be lost: needed if the records are converted (`changed_keys`).
    :raises TailraceError: `CONFIG_INVALID`, with the place in the list; or as `extensions.factory`.
    """
    chosen = {name: _predicate(name, given) for name, given in (predicates or {}).items()}
    found = [_step(place, given, chosen) for place, given in enumerate(transformations)]
    if splits_updates:
        found = [
            replace(step, transformation=WithSplitUpdates(step.transformation)) if step.trusted else step
            for step in found
        ]
    return Chain(tuple(found))


def _step(place: int, given: TransformationLike, predicates: Mapping[str, Predicate]) -> Step:
    where: Path = ("transformations", place)
    if isinstance(given, Mapping):
        given = _validated(options.AnyTransformation, given, where)
    if not isinstance(given, steps.TransformationConfig):
        return Step(f"transformations[{place}] {type(given).__name__}", _as_transformation(given, where))
    name = f"transformations[{place}] {getattr(given, 'type', '')}"
    if given.predicate is not None and given.predicate not in predicates:
        known = ", ".join(predicates) or "none"
        raise _invalid(
            (*where, "predicate"), f"there is no predicate {given.predicate!r}; there are: {known}"
        )
    predicate = None if given.predicate is None else predicates[given.predicate]
    trusted = type(given) in _MADE
    return Step(name, _made(given, where), predicate, given.negate, trusted)


def _made(given: steps.TransformationConfig, where: Path) -> Transformation:
    if isinstance(given, options.ThirdParty):
        make = extensions.factory(extensions.TRANSFORMATIONS, given.type, ())
        return _as_transformation(_called(make, given.options, where), where)
    made: Transformation = _read(lambda: _MADE[type(given)](given), where)
    return made


def _predicate(name: str, given: PredicateLike) -> Predicate:
    where: Path = ("predicates", name)
    if isinstance(given, Mapping):
        given = _validated(choices.AnyPredicate, given, where)
    if isinstance(given, choices.ThirdPartyPredicate):
        make = extensions.factory(extensions.PREDICATES, given.type, ("matches",))
        given = _called(make, given.options, where)
    if isinstance(given, Section):
        model = given
        found: Predicate = _read(lambda: _CHOOSING[type(model)](model), where)
        return found
    if isinstance(given, type):
        raise _invalid(where, f"the class {given.__name__} is not a predicate: pass an object of it")
    if not isinstance(given, Predicate):
        raise _invalid(where, f"{type(given).__name__} is not a predicate: it has no method matches")
    return given


def _as_transformation(given: object, where: Path) -> Transformation:
    if isinstance(given, type):
        raise _invalid(where, f"the class {given.__name__} is not a transformation: pass an object of it")
    if isinstance(given, Transformation):
        return given
    if isinstance(given, RecordTransformation):
        return OneByOne(given)
    raise _invalid(
        where,
        f"{type(given).__name__} is not a transformation: it has no method apply or apply_record",
    )


def _called(make: Callable[..., Any], given: Mapping[str, Any], where: Path) -> Any:
    try:
        return make(**given)
    except TailraceError:
        raise
    except Exception as error:
        # Its message may quote a setting, which may be a misplaced secret.
        raise _invalid(where, f"its package refused the settings: {type(error).__name__}") from error


@functools.cache
def _reader(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation)


def _validated(annotation: Any, given: Mapping[str, Any], where: Path) -> Any:
    try:
        return _reader(annotation).validate_python(dict(given))
    except ValidationError as error:
        problems = from_pydantic(error, Section, ())  # no names of settings, so none are suggested
        raise _refused(
            [ConfigProblem((*where, *problem.path), problem.message) for problem in problems]
        ) from None


def _read(make: Callable[[], Any], where: Path) -> Any:
    try:
        return make()
    except ExpressionError as error:
        raise _invalid(where, str(error)) from None


def _invalid(where: Path, message: str) -> TailraceError:
    return _refused([ConfigProblem(where, message)])


def _refused(problems: Sequence[ConfigProblem]) -> TailraceError:
    return TailraceError(
        Kind.CONFIG_INVALID,
        f"build the transformations: {'; '.join(map(str, problems))}",
        "docs/transformations.md describes every setting",
    )
