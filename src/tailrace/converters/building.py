"""From a converter's name and options to the converter: ours and those of other packages alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tailrace.converters.contract import Converter
from tailrace.errors import Kind, TailraceError
from tailrace.extensions import CONVERTERS, factory


def build(name: str, options: Mapping[str, Any]) -> Converter:
    """Return a converter that an installed package announces.

    :raises TailraceError: as `extensions.factory`; `CONFIG_INVALID` if it does not take the options.
    """
    make: Callable[..., Converter] = factory(CONVERTERS, name, ("convert", "close"))
    try:
        return make(**options)
    except TailraceError:
        raise
    except Exception as error:
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"make the converter {name!r}: it raised {type(error).__name__}",
            "check its options; the cause of this error has its words",
            {"converter": name},
        ) from error
