"""Chooses the section of a source by its type: PostgreSQL's, or that of an installed package."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
)
from pydantic_core import InitErrorDetails

from tailrace import extensions
from tailrace.config.source.postgres import NamedSource, PostgresSource, SourceName
from tailrace.config.source.section import SourceSection
from tailrace.errors import Kind, TailraceError

_BUILT_IN = "postgresql"


@functools.cache
def _section(name: str, *, is_named: bool) -> type[SourceSection]:
    made = extensions.factory(extensions.SOURCES, name, ("settings",))
    section = getattr(made, "settings", None)
    if not (isinstance(made, type) and isinstance(section, type) and issubclass(section, SourceSection)):
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"load the source {name!r}: its entry point names no class whose `settings` is a subclass of "
            "tailrace.config.source.section.SourceSection",
            "correct the package: docs/own-sources.md describes the class",
            {"name": name},
        )
    if not is_named:
        return section
    place = Field(description="Name of the source, no other's.")
    return create_model(f"Named{section.__name__}", __base__=section, name=(SourceName, place))


def _of_type(
    value: Any, built_in: ValidatorFunctionWrapHandler, info: ValidationInfo, *, is_named: bool
) -> Any:
    if isinstance(value, SourceSection):
        return value
    name = value.get("type") if isinstance(value, dict) else None
    if not isinstance(name, str) or name == _BUILT_IN:
        return built_in(value)
    installed = extensions.names(extensions.SOURCES)
    if name in installed:
        return _section(name, is_named=is_named).model_validate(value, context=info.context)
    known = ", ".join(map(repr, (_BUILT_IN, *installed)))
    unknown = InitErrorDetails(type="literal_error", loc=("type",), input=name, ctx={"expected": known})
    raise ValidationError.from_exception_data("source", [unknown])


def _of_pipeline(value: Any, built_in: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    # One source's pipeline is passed to executors as JSON, with the source's name if there are several.
    is_named = isinstance(value, dict) and "name" in value
    if is_named and value.get("type", _BUILT_IN) == _BUILT_IN:
        return NamedSource.model_validate(value, context=info.context)
    return _of_type(value, built_in, info, is_named=is_named)


if TYPE_CHECKING:
    AnySource = SourceSection
    AnyNamedSource = SourceSection
    PipelineSource = SourceSection
else:
    AnySource = Annotated[
        SerializeAsAny[PostgresSource], WrapValidator(functools.partial(_of_type, is_named=False))
    ]
    AnyNamedSource = Annotated[
        SerializeAsAny[NamedSource], WrapValidator(functools.partial(_of_type, is_named=True))
    ]
    PipelineSource = Annotated[SerializeAsAny[PostgresSource], WrapValidator(_of_pipeline)]
