"""References to secrets, which are resolved where they are used and shown nowhere.

A `Secret` holds text with references in it, `${env:NAME}` or `${file:/path}`, and nothing
else: its repr, its JSON and its pickle can't show a value that it never held. `resolve`
reads the value again each time, so a rotated password is found at the next connection.

`redact` is the second line: what was resolved as a password in this process is cut out of
any text that is about to be shown. It is for words of others (a driver, Spark), never a
reason to put a secret into a message.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import GetCoreSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, core_schema

from tailrace.errors import Kind, TailraceError

REFERENCE = re.compile(r"\$\{(env|file):([^{}]+)\}")

#: A secret's file is read up to this size; more is surely the wrong file.
FILE_BYTES_MAX = 64 * 1024

#: Shorter values are not cut out of text: they would cut it to pieces.
REDACTED_LENGTH_MIN = 4

REFUSAL = "must be a reference, ${env:NAME} or ${file:/path}: a secret does not belong in this file"


@dataclass(frozen=True, slots=True)
class Secret:
    """Text that refers to values kept elsewhere, such as `${env:PG_PASSWORD}`."""

    reference: str

    def __post_init__(self) -> None:
        check_references(self.reference)
        if not REFERENCE.search(self.reference):
            raise ValueError(REFUSAL)

    def __str__(self) -> str:
        return self.reference

    def resolve(self) -> str:
        """Return the value, read now.

        :raises TailraceError: `SECRET_MISSING` if a variable is not set or a file can't be read.
        """
        return REFERENCE.sub(lambda found: _read(found[1], found[2]), self.reference)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(
            cls._validate, serialization=core_schema.to_string_ser_schema()
        )

    @classmethod
    def _validate(cls, value: object, info: ValidationInfo) -> Secret:
        # A password may be one whole reference only: "abc${env:X}" has half of it in the file.
        if isinstance(value, Secret):
            return value
        if not isinstance(value, str) or not is_reference(value):
            raise ValueError(REFUSAL)
        return cls(anchored(value, (info.context or {}).get("base")))


def is_reference(text: str) -> bool:
    """Tell whether `text` is one reference and nothing else."""
    return REFERENCE.fullmatch(text) is not None


def has_reference(text: str) -> bool:
    """Tell whether there is a reference in `text`, well formed or not."""
    return "${" in text


def check_references(text: str) -> None:
    """Refuse what looks like a reference and is none.

    :raises ValueError: with a message that shows nothing of `text`.
    """
    if "${" in REFERENCE.sub("", text):
        raise ValueError("holds a reference that is neither ${env:NAME} nor ${file:/path}")


def anchored(text: str, base: Path | None) -> str:
    """Return `text` with relative file references made absolute, from `base` or where we are."""

    def absolute(found: re.Match[str]) -> str:
        if found[1] != "file":
            return found[0]
        return f"${{file:{((base or Path()) / Path(found[2]).expanduser()).absolute()}}}"

    return REFERENCE.sub(absolute, text)


def resolved(value: str | Secret) -> str:
    """Return `value` with the references in it resolved."""
    text = str(value)
    return Secret(text).resolve() if has_reference(text) else text


def _read(scheme: str, name: str) -> str:
    reference = f"${{{scheme}:{name}}}"
    if scheme == "env":
        value = os.environ.get(name)
        if value is None:
            raise TailraceError(
                Kind.SECRET_MISSING,
                f"resolve {reference}: the environment variable is not set",
                f"set it before the command, for example: export {name}=…",
            )
        return value
    try:
        with open(name, encoding="utf-8") as file:
            text = file.read(FILE_BYTES_MAX + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise TailraceError(
            Kind.SECRET_MISSING,
            f"resolve {reference}: {reason}",
            "check that the file is there and readable by this user",
        ) from None
    if len(text) > FILE_BYTES_MAX:
        raise TailraceError(
            Kind.SECRET_MISSING,
            f"resolve {reference}: the file is larger than {FILE_BYTES_MAX} bytes",
            "the file must hold the secret and nothing else",
        )
    return text.removesuffix("\n").removesuffix("\r")


_lock = threading.Lock()
_seen: set[str] = set()


def remember(value: str) -> None:
    """Have `redact` cut `value` out of text from now on."""
    if len(value) >= REDACTED_LENGTH_MIN:
        with _lock:
            _seen.add(value)


def redact(text: str) -> str:
    """Return `text` without any secret that this process has resolved."""
    with _lock:
        seen = sorted(_seen, key=len, reverse=True)
    for value in seen:
        text = text.replace(value, "***")
    return text


MASK = "***"

#: Names of settings whose values are never shown.
_SECRET = re.compile(
    r"pass(word|wd|phrase|file)?|pwd|secret|token|credential|private|api_?key|salt", re.IGNORECASE
)

#: What settings within `options` are called here.
_OF_CLIENT = "options.*"

#: Passwords within connection strings: of a URL, up to its last `@`, and of a list of settings.
_WITHIN = re.compile(r"(://[^:/@\s]*:)\S*(?=@)|(password\s*=\s*)('[^']*'|[^&;\s]*)", re.IGNORECASE)


def masked(value: Any, name: str = "") -> Any:
    """Return `value` as it may be shown; `name` is what it is called. References are shown as they are.

    Of `options`, which are a client's own, references alone: a name that is misspelt tells nothing.
    """
    if isinstance(value, Mapping):
        called = _OF_CLIENT if name in ("options", _OF_CLIENT) else ""
        return {key: masked(inner, called or str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner, name) for inner in value]
    is_secret = name == _OF_CLIENT or _SECRET.search(name) is not None
    if isinstance(value, str):
        if is_secret and not REFERENCE.fullmatch(value):
            return MASK
        return _WITHIN.sub(lambda found: (found[1] or found[2]) + MASK, redact(value))
    if value is None or isinstance(value, bool):
        return value
    return MASK if is_secret else value
