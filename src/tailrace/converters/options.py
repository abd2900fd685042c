"""Options of a converter, checked where it is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from tailrace.config.converters import problems_of
from tailrace.config.fields import Section
from tailrace.errors import Kind, TailraceError

_Options = TypeVar("_Options", bound=Section)


def checked(model: type[_Options], name: str, options: Mapping[str, Any]) -> _Options:
    """Return the options of the converter `name`.

    :raises TailraceError: `CONFIG_INVALID`, naming every option that is wrong.
    """
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"make the converter {name!r}: {problems_of(error)}",
            f"its options are {', '.join(model.model_fields) or 'none'}",
            {"converter": name},
        ) from None
