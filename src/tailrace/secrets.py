"""References to secrets, which are resolved where they are used, and never shown.

A `Secret` has text with references in it, `${env:NAME}` or `${file:/path}`, but no value, so
its repr, JSON and pickle can't show one. `resolve` reads the value each time, so the next
connection uses a rotated password.

`redact` is the second line of defence: it removes passwords that this process has resolved
from text that is about to be shown. It is for texts of other libraries (a driver, Spark),
never a reason to put a secret into a message.
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

#: Largest size of a secret's file, in bytes; a larger one is surely the wrong file.
FILE_BYTES_MAX = 64 * 1024

#: Least length of a value that `redact` removes; a shorter one would match parts of ordinary words.
REDACTED_LENGTH_MIN = 4

REFUSAL = "must be a reference, ${env:NAME} or ${file:/path}: a secret does not belong in this file"


@dataclass(frozen=True, slots=True)
class Secret:
    """Text with references to values that are stored elsewhere, such as `${env:PG_PASSWORD}`."""

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
        # The whole text must be one reference: "abc${env:X}" would have a part of the secret in the file.
        if isinstance(value, Secret):
            return value
        if not isinstance(value, str) or not is_reference(value):
            raise ValueError(REFUSAL)
        return cls(anchored(value, (info.context or {}).get("base")))


def is_reference(text: str) -> bool:
    """Return whether `text` is one reference and nothing else."""
    return REFERENCE.fullmatch(text) is not None


def has_reference(text: str) -> bool:
    """Return whether there is a reference in `text`, well formed or not."""
    return "${" in text


def check_references(text: str) -> None:
    """Raise if `text` has a malformed reference.

    :raises ValueError: with a message that shows nothing of `text`.
    """
    if "${" in REFERENCE.sub("", text):
        raise ValueError("holds a reference that is neither ${env:NAME} nor ${file:/path}")


def anchored(text: str, base: Path | None) -> str:
    """Return `text` with file references made absolute, relative to `base` or the working directory."""

    def absolute(found: re.Match[str]) -> str:
        if found[1] != "file":
            return found[0]
        return f"${{file:{((base or Path()) / os.path.expanduser(found[2])).absolute()}}}"

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
            "check that the file exists and is readable by this user",
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
    """Make `redact` remove `value` from text from now on."""
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

#: Name that stands for all settings within `options`.
_OF_CLIENT = "options.*"

#: Passwords within connection strings: in a URL, up to its last `@`, and in a list of settings.
_WITHIN = re.compile(r"(://[^:/@\s]*:)\S*(?=@)|(password\s*=\s*)('[^']*'|[^&;\s]*)", re.IGNORECASE)


def masked(value: Any, name: str = "") -> Any:
    """Return `value` with secrets masked; `name` is the name of its setting. References stay unchanged.

    All values within a client's `options` are masked: a misspelt name doesn't show that it is a secret.
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
