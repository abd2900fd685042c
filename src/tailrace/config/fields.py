"""The base of every section of the file, and the field types that sections share."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    ValidationInfo,
    field_validator,
)

from tailrace.secrets import REFERENCE, Secret, anchored, check_references, has_reference

MIB = 1024 * 1024

_SIZE = re.compile(r"(\d{1,15}) ?(B|KiB|MiB|GiB|TiB)")
_FACTORS = {"B": 1, "KiB": 1024, "MiB": MIB, "GiB": 1024 * MIB, "TiB": 1024 * 1024 * MIB}


def _not_truth(kind: str) -> BeforeValidator:
    def check(value: object) -> object:
        if isinstance(value, bool):
            raise ValueError(f"must be a {kind}")
        return value

    return BeforeValidator(check)


#: By the types that a field's value can have.
_CHECKS = {frozenset({int}): _not_truth("whole number"), frozenset({float}): _not_truth("number")}

#: The lock of `Section.model_rebuild`, held while a section is built.
_building = threading.RLock()


class Section(BaseModel):
    """A part of the configuration: frozen, without unknown keys; its errors do not show its input."""

    # Built when it is first used: a section that is only a part of another one is never built by itself.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, defer_build=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **more: Any) -> None:
        """Have true and false refused for numbers: pydantic takes them for 1 and 0."""
        super().__pydantic_init_subclass__(**more)
        for field in cls.model_fields.values():
            check = _CHECKS.get(frozenset(_kinds_in(field.annotation)) - {type(None)})
            if check is not None and check not in field.metadata:
                field.metadata.append(check)

    @field_validator("*")
    @classmethod
    def _has_no_reference(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse references in text that is used as it is: other text with references is a `Secret` here.

        The options in a `dsn` are resolved one by one.
        """
        texts = [str(part) for part in _parts(value) if isinstance(part, str | Path)]
        if info.field_name != "dsn" and any(map(REFERENCE.search, texts)):
            raise ValueError("can't have a reference, ${env:NAME} or ${file:/path}: write the value itself")
        return value

    @classmethod
    def model_rebuild(
        cls,
        *,
        force: bool = False,
        raise_errors: bool = True,
        _parent_namespace_depth: int = 2,
        _types_namespace: Any = None,
    ) -> bool | None:
        """Build the section, on one thread at a time: pydantic before 2.14 does not lock this itself."""
        with _building:
            return super().model_rebuild(
                force=force,
                raise_errors=raise_errors,
                _parent_namespace_depth=_parent_namespace_depth + 1,  # for this function's own frame
                _types_namespace=_types_namespace,
            )

    @classmethod
    def key_names(cls) -> set[str]:
        """Return the keys that the section may have."""
        return set(cls.model_fields)


def _kinds_in(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        for each in get_args(annotation):
            yield from _kinds_in(each)
    else:
        yield annotation


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else (value,)


class Extension(Section):
    """A section for an extension: its name, `type`, and its options."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(min_length=1, description="Its name.")

    @property
    def options(self) -> dict[str, Any]:
        """The keys that are not fields of this section, with their values."""
        return dict(self.__pydantic_extra__ or {})

    # Pydantic's own attribute for keys that are not fields.
    __pydantic_extra__: dict[str, JsonValue] = Field(init=False)


def _bytes(value: object) -> object:
    if isinstance(value, str):
        found = _SIZE.fullmatch(value.strip())
        if not found:
            raise ValueError("must be a number of bytes, such as 1048576 or 1 MiB")
        return int(found[1]) * _FACTORS[found[2]]
    return value


def local_path(value: object, base: Path) -> Path:
    """Return a path on a local or mounted file system; a relative one is relative to `base`.

    :raises ValueError: if `value` is none.
    """
    if not isinstance(value, str | Path) or not str(value):
        raise ValueError("must be a path")
    if "\0" in str(value):
        raise ValueError("must be a path without a NUL byte")
    if "://" in str(value):
        raise ValueError("must be a path on a local or mounted file system, not a URL")
    try:
        found = base / Path(value).expanduser()
    except RuntimeError:
        raise ValueError("begins with a home directory that is not known here") from None
    if not str(found).isascii():
        _require_utf8(str(found))
    return found


def _path(value: object, info: ValidationInfo) -> Path:
    return local_path(value, (info.context or {}).get("base", Path()))


def _require_utf8(path: str) -> None:
    """Check that all libraries use the same bytes for a path: some always use UTF-8.

    :raises ValueError: if they do not.
    """
    if (encoding := sys.getfilesystemencoding()) != "utf-8":
        raise ValueError(
            f"has characters that are no ASCII, and this process has the encoding {encoding}: set "
            "PYTHONUTF8=1, or LC_ALL=C.UTF-8"
        )
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError("is in a directory, or has a name, that is not UTF-8") from None


def text_or_reference(value: object, info: ValidationInfo) -> str | Secret:
    """Return text unchanged, or as a `Secret` if it has references.

    :raises ValueError: if it is not text; does not show it.
    """
    if isinstance(value, Secret):
        return value
    if not isinstance(value, str):
        raise ValueError("must be text: put it in quotes")
    if "\0" in value:
        raise ValueError("must be text without a NUL byte")
    check_references(value)
    return Secret(anchored(value, (info.context or {}).get("base"))) if has_reference(value) else value


def file_name(value: object, info: ValidationInfo) -> str | Secret:
    """Return the absolute name of a file; a `Secret` if it has references.

    :raises ValueError: as `text_or_reference`, or if it is a URL.
    """
    found = text_or_reference(value, info)
    if isinstance(found, Secret) or found == "system":  # libpq's word for the system's trusted roots
        return found
    return str(_path(found, info))


#: A number of bytes; a file may also have text such as `256 MiB`.
ByteCount = Annotated[int, BeforeValidator(_bytes)]

#: A path; one from a file is relative to that file.
LocalPath = Annotated[Path, BeforeValidator(_path)]

#: Text that may have references to secrets.
Text = Annotated[str | Secret, BeforeValidator(text_or_reference), PlainSerializer(str, return_type=str)]

#: As `Text`, for the name of a file; a relative one is relative to the configuration.
FileName = Annotated[str | Secret, BeforeValidator(file_name), PlainSerializer(str, return_type=str)]


def context_for(base: Path) -> dict[str, Any]:
    """Return the validation context that makes relative paths relative to `base`."""
    return {"base": base}


def _name(value: str) -> str:
    # 54 characters, so that `tailrace_<name>` is short enough for a slot's name.
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,53}", value):
        raise ValueError("must be 1 to 54 letters, digits or any of _ . -, with a letter or digit first")
    return value


Name = Annotated[str, AfterValidator(_name)]


def _setting(value: object, info: ValidationInfo) -> object:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if not isinstance(value, str | Secret):
        raise ValueError("must be one value: text, a number, true or false")
    return text_or_reference(value, info)


Setting = Annotated[str | Secret, BeforeValidator(_setting), PlainSerializer(str, return_type=str)]
