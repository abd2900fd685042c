"""What is done for a document of a schema, step by step: what `avro_binary` carries out."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tailrace.converters.connect_schemas import Document, written
from tailrace.protocol.frames import Bytes

# What a program does, with a place in it or a length as argument.
(
    END, NULLABLE, NULLABLE_LAST, OPEN, NAME, CLOSE, INT, LONG, FLOAT, DOUBLE, BOOLEAN, STRING, BYTES,
    ARRAY, NEXT_ITEM, MAP, NEXT_ENTRY,
) = range(17)  # fmt: skip

_SCALARS = {
    "int8": INT, "int16": INT, "int32": INT, "int64": LONG, "float": FLOAT, "double": DOUBLE,
    "boolean": BOOLEAN, "string": STRING, "bytes": BYTES,
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """What is done for one document.

    :param steps: of each what, its argument, and where in `names` its text begins.
    :param names: as they stand in documents, laid end to end.
    :param paths: for each step the member that it is about, for errors.
    """

    steps: npt.NDArray[np.int64]
    names: Bytes
    paths: tuple[str, ...]


def program_of(schema: Document) -> Program:
    """Return the program for values of a schema, as `schemas.Schema.document` has it."""
    return _program(json.dumps(schema))


@functools.lru_cache(maxsize=512)
def _program(schema: str) -> Program:
    steps: list[_Step] = []
    _compile(json.loads(schema), "", steps)
    steps.append(_Step(END))
    ends = np.cumsum([0, *(len(step.name) for step in steps)])
    return Program(
        np.array([(step.what, step.to or len(step.name), at) for step, at in zip(steps, ends, strict=False)]),
        np.frombuffer(b"".join(step.name for step in steps), np.uint8),
        tuple(step.path for step in steps),
    )


@dataclass(slots=True)
class _Step:
    what: int
    path: str = ""
    to: int = 0  # another step
    name: bytes = b""


def _compile(schema: Document, path: str, steps: list[_Step]) -> None:
    nullable = None
    if schema["optional"]:
        nullable = _Step(NULLABLE if schema.get("default") is None else NULLABLE_LAST, path)
        steps.append(nullable)
    kind = schema["type"]
    if kind == "struct":
        steps.append(_Step(OPEN, path))
        for place, field in enumerate(schema["fields"]):
            name = field["field"]
            within = f"{path}.{name}" if path else name
            steps.append(_Step(NAME, within, name=f"{',' if place else ''}{written(name)}:".encode()))
            _compile(field, within, steps)
        steps.append(_Step(CLOSE, path))
    elif kind in ("array", "map"):
        begin = _Step(ARRAY if kind == "array" else MAP, path)
        steps.append(begin)
        body = len(steps)
        _compile(schema["items" if kind == "array" else "values"], path, steps)
        steps.append(_Step(NEXT_ITEM if kind == "array" else NEXT_ENTRY, path, body))
        begin.to = len(steps)
    else:
        steps.append(_Step(_SCALARS[kind], path))
    if nullable is not None:
        nullable.to = len(steps)
