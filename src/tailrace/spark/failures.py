"""Errors on their way out of Spark.

An error that an executor raises reaches the driver as text inside a Java exception. The text
of a `TailraceError` holds its kind, message, circumstances and hint, so it can be read back:
a person is told what went wrong, not that "stage 3 failed four times".
"""

from __future__ import annotations

import re

from tailrace.errors import Kind, TailraceError

_RAISED = re.compile(
    r"tailrace\.errors\.TailraceError: (?P<kind>[a-z_]+): (?P<message>[^\n]*)"
    r"(?:\n\s*hint: (?P<hint>[^\n]*))?"
)
_CONTEXT = re.compile(r" \((\w+=[^()]*)\)$")
_KINDS = frozenset(str(kind) for kind in Kind)
#: Spark repeats itself over many lines; the first says it.
_MESSAGE_CHARS_MAX = 300


def translated(error: BaseException) -> TailraceError:
    """Return the `TailraceError` that an executor raised, or `SPARK_FAILED` with Spark's words.

    :param error: anything that PySpark or py4j raised; a `TailraceError` is returned as it is.
    """
    if isinstance(error, TailraceError):
        return error
    text = str(error)
    found = next((raised for raised in _RAISED.finditer(text) if raised["kind"] in _KINDS), None)
    if found is None:
        return TailraceError(
            Kind.SPARK_FAILED,
            f"run a Spark job: {type(error).__name__}: {_first_line(text)}",
            "Spark's own log, on standard error, tells more",
        )
    message = found["message"].strip()
    context: dict[str, str] = {}
    if (at := _CONTEXT.search(message)) is not None:
        context = dict(item.partition("=")[::2] for item in at[1].split(", ") if "=" in item)
        message = message[: at.start()]
    return TailraceError(Kind(found["kind"]), message, (found["hint"] or "").strip(), context)


def _first_line(text: str) -> str:
    lines = (line.strip() for line in text.splitlines())
    return next((line for line in lines if line), "no message")[:_MESSAGE_CHARS_MAX]
