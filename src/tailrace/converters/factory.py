"""Creates converters, Tailrace's and other packages', by name and options, and checks what they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from pydantic import ValidationError

from tailrace.config.converters import problems_of
from tailrace.config.fields import Section
from tailrace.converters.contract import Converter
from tailrace.converters.headers import with_json
from tailrace.errors import Kind, RetriableError, StopEngine, TailraceError
from tailrace.extensions import CONVERTERS, factory
from tailrace.records.events import Converted
from tailrace.records.group import Group

_Options = TypeVar("_Options", bound=Section)


def build(name: str, options: Mapping[str, Any]) -> Converter:
    """Return a converter that an installed package provides.

    :raises TailraceError: as `extensions.factory`; `CONFIG_INVALID` if it does not accept the options.
    """
    make: Callable[..., Converter] = factory(CONVERTERS, name, ("convert", "close"))
    try:
        return make(**options)
    except TailraceError:
        raise
    except Exception as error:
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"create the converter {name!r}: it raised {type(error).__name__}",
            "check its options; the cause of this error has its message",
            {"converter": name},
        ) from error


@dataclass(frozen=True, slots=True)
class Converting:
    """A converter whose results are checked. Can be pickled if the converter can.

    :param to_kafka: whether structs, lists and maps in headers become JSON: Kafka's headers are bytes.
    """

    converter: Converter
    to_kafka: bool = False

    def __call__(self, group: Group) -> Converted:
        """Return the events of a group.

        :raises TailraceError: as the converter; `CONVERSION_FAILED` for its other exceptions, except
            `RetriableError` and `StopEngine`, and for a result that breaks the contract.
        """
        try:
            found: Any = self.converter.convert(group)
        except (TailraceError, RetriableError, StopEngine):
            raise
        except Exception as error:
            raise self._failure(group, f"{type(error).__name__} was raised") from error
        if (breach := _breach(found, len(group))) is not None:
            raise self._failure(group, breach)
        converted: Converted = found
        if self.to_kafka and converted.headers is not None:
            return replace(converted, headers=with_json(converted.headers))
        return converted

    def _failure(self, group: Group, found: str) -> TailraceError:
        return TailraceError(
            Kind.CONVERSION_FAILED,
            f"convert records: {found}",
            "tailrace.converters.contract describes what a converter must return",
            {"converter": type(self.converter).__name__, "topic": group.topic},
        )


def _breach(found: Any, records: int) -> str | None:
    """Return how a converter's result for this number of records breaks the contract; None: it does not."""
    if not isinstance(found, Converted):
        return f"it returned {type(found).__name__} instead of Converted"
    try:
        events = len(found.values)
        lengths = {"keys": found.keys, "headers": found.headers, "rows": found.rows}
        for name, part in lengths.items():
            if part is not None and len(part) != events:
                return f"it returned {events} values and {len(part)} {name}"
    except TypeError:
        return "its keys or values have no length"
    if found.rows is None:
        if events == records:
            return None
        return f"it returned {events} events for {records} records, without rows"
    rows: Any = found.rows
    if not isinstance(rows, np.ndarray) or rows.dtype.kind != "i":
        return "its rows are not an array of integers"
    if events and (rows[0] < 0 or rows[-1] >= records or (np.diff(rows) < 0).any()):
        return "its rows descend, or are not rows of the group"
    if found.headers is not None and not isinstance(found.headers, pa.StructArray):
        return "its headers are not a struct array"
    return None


def checked(model: type[_Options], name: str, options: Mapping[str, Any]) -> _Options:
    """Return the validated options of the converter `name`.

    :raises TailraceError: `CONFIG_INVALID`, naming every wrong option.
    """
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"create the converter {name!r}: {problems_of(error, model)}",
            f"its options are {', '.join(model.model_fields) or 'none'}",
            {"converter": name},
        ) from None
