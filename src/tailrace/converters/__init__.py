"""Converters: the format of the records that are sent: JSON, Avro, CloudEvents, Arrow or Python objects.

The public names are imported on first use: an implementation of the contract needs no kernels.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailrace.converters.cloudevents import CloudEventsConverter
    from tailrace.converters.contract import Converter
    from tailrace.converters.debezium import JsonConverter
    from tailrace.converters.native import ArrowConverter, PythonConverter
    from tailrace.converters.with_registry import AvroConverter, JsonSchemaConverter
    from tailrace.records.events import Converted

__all__ = [
    "ArrowConverter",
    "AvroConverter",
    "CloudEventsConverter",
    "Converted",
    "Converter",
    "JsonConverter",
    "JsonSchemaConverter",
    "PythonConverter",
]

_PLACES = {
    "ArrowConverter": "tailrace.converters.native",
    "AvroConverter": "tailrace.converters.with_registry",
    "CloudEventsConverter": "tailrace.converters.cloudevents",
    "Converted": "tailrace.records.events",
    "Converter": "tailrace.converters.contract",
    "JsonConverter": "tailrace.converters.debezium",
    "JsonSchemaConverter": "tailrace.converters.with_registry",
    "PythonConverter": "tailrace.converters.native",
}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        found = getattr(importlib.import_module(_PLACES[name]), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
