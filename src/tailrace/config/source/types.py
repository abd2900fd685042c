"""Chooses the section of a source by its type: PostgreSQL's, or that of an installed package."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    Field,
    SerializeAsAny,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
)

from tailrace import extensions
from tailrace.config.source.postgres import NamedSource, PostgresSource, SourceName
from tailrace.config.source.section import SourceSection


@functools.cache
def _section(name: str, *, is_named: bool) -> type[SourceSection]:
    section: type[SourceSection] = extensions.factory(extensions.SOURCES, name, ("settings",)).settings  # type: ignore[attr-defined]
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
    if isinstance(name, str) and name in extensions.names(extensions.SOURCES):
        return _section(name, is_named=is_named).model_validate(value, context=info.context)
    return built_in(value)


def _of_pipeline(value: Any, built_in: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    # One source's pipeline is passed to executors as JSON, with the source's name if there are several.
    is_named = isinstance(value, dict) and "name" in value
    if is_named and value.get("type", "postgresql") == "postgresql":
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
