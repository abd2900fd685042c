"""What records go through before they are handed over: transformations, then the converter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from tailrace.config import EngineOptions
from tailrace.config.fields import Extension
from tailrace.config.problems import from_pydantic
from tailrace.converters import factory as converters
from tailrace.converters.contract import Converter
from tailrace.errors import Kind, TailraceError
from tailrace.records.group import Group
from tailrace.transforms import factory


@dataclass(frozen=True, slots=True)
class Stages:
    """The functions, None where there is nothing to do, and what is to be closed after the last call."""

    transform: Callable[[Group], Iterable[Group]] | None
    convert: Callable[[Group], Any] | None
    closers: tuple[Callable[[], None], ...]


def stages_of(
    transformations: Sequence[factory.TransformationLike],
    predicates: Mapping[str, factory.PredicateLike],
    converter: Converter | Extension | Mapping[str, Any] | str | None,
    options: EngineOptions,
) -> Stages:
    """Return the stages: the transformations of the options, then those given in Python.

    A converter that is given in Python takes the place of the options'.
    :raises TailraceError: `CONFIG_INVALID`, `ENVIRONMENT_UNFIT`.
    """
    chain = factory.build([*options.transformations, *transformations], {**options.predicates, **predicates})
    converting = _converter(converter if converter is not None else options.converter)
    closers = [chain.close]
    if converting is not None:
        closers.append(converting.close)
    return Stages(
        chain.apply if len(chain) else None,
        None if converting is None else converters.Converting(converting),
        tuple(closers),
    )


def _converter(given: Converter | Extension | Mapping[str, Any] | str | None) -> Converter | None:
    if isinstance(given, str):
        given = Extension(type=given)
    if isinstance(given, Mapping):
        given = _section(given)
    if isinstance(given, Extension):
        given = converters.build(given.type, given.options)
    if given is not None and not isinstance(given, Converter):
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"create the engine: {type(given).__name__} is no converter",
            "a converter is a tailrace.converters.contract.Converter",
        )
    return given


def _section(given: Mapping[str, Any]) -> Extension:
    try:
        return Extension.model_validate(dict(given))
    except ValidationError as error:
        lines = "".join(f"\n  {problem}" for problem in from_pydantic(error, Extension, ()))
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"create the engine: converter:{lines}",
            "a converter's section has its type and its options",
        ) from None
