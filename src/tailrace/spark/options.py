"""The options of `format("tailrace")`, checked as a whole before anything is read."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Self
from urllib.parse import unquote, urlsplit

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.alias_generators import to_camel

from tailrace.changelog.directory import encode_name
from tailrace.config.fields import Section
from tailrace.config.problems import from_pydantic
from tailrace.config.values import HandlingModes
from tailrace.errors import Kind, TailraceError

_ATTEMPT = "read a change log"

#: Limit of an encoded reader name, in characters: file names of up to 255 bytes, less prefixes and suffixes.
_READER_NAME_CHARS_MAX = 200


def _invalid(found: str, hint: str) -> TailraceError:
    return TailraceError(Kind.CONFIG_INVALID, f"{_ATTEMPT}: {found}", hint)


def by_spelling(
    model: type[Section],
    given: Mapping[str, str],
    invalid: Callable[[str, str], TailraceError],
    *,
    also: str = "",
    but: Collection[str] = (),
) -> dict[str, str]:
    """Return the options by their documented spelling: a field's alias, or else its name in camel case.

    Spark passes keys in lower case, so case does not matter.

    :param invalid: returns the error for a description of the problem and a hint.
    :param also: the options that are not in the model, for the hint.
    :param but: fields of the model that are not options.
    :raises TailraceError: for an unknown option, with the nearest known one.
    """
    fields = ((name, field.alias) for name, field in model.model_fields.items() if name not in but)
    spellings = {own.lower(): own for name, alias in fields if (own := alias or to_camel(name))}
    found: dict[str, str] = {}
    for key, value in given.items():
        if (known := spellings.get(key.lower().replace("_", ""))) is None:
            near = difflib.get_close_matches(key.lower(), spellings, n=1)
            hint = f"did you mean {spellings[near[0]]}?" if near else ", ".join(spellings.values()) + also
            raise invalid(f"{key!r} is not an option", hint if near else f"the options are {hint}")
        found[known] = value
    return found


def local_path(text: str) -> str:
    """Return an absolute path for a path or a `file:` URL.

    :raises TailraceError: `CONFIG_INVALID` for another URL.
    """
    if text.startswith("file:"):
        text = unquote(urlsplit(text).path)
    if "://" in text:
        raise _invalid(
            f"the option path is a URL, of {text.partition(':')[0]}",
            "name a directory of a local or mounted file system, which executors see under the same path",
        )
    return os.path.abspath(text)


def _table(text: str) -> str:
    if not all(text.partition(".")[::2]):
        raise _invalid(
            f"the option table is {text!r}",
            "write it as schema.table, without quotes, in the database's own spelling",
        )
    return text


def _reader_name(text: str | None) -> str | None:
    if text and len(encode_name(text)) > _READER_NAME_CHARS_MAX:
        raise _invalid(
            f"the option readerName has {len(text)} characters, too many for a file's name",
            f"choose a shorter name, of at most {_READER_NAME_CHARS_MAX} letters and digits",
        )
    return text or None


class ReadOptions(HandlingModes):
    """The options of a reader, spelled as a field's alias, or else as its name in camel case.

    `starting` and `ending` are positions in the log as text: `earliest`, `latest`, a log offset,
    an LSN or a time; `position.resolve` finds them. `task` is "" if the option is not set. `raw`
    reads all columns, unmasked, whatever the pipeline's column policy says.
    """

    model_config = ConfigDict(alias_generator=to_camel)

    path: Annotated[str, AfterValidator(local_path)]
    task: str = ""
    table: Annotated[str, AfterValidator(_table)] | None = None
    starting: str = Field(default="earliest", alias="startingOffset")
    ending: str = Field(default="latest", alias="endingOffset")
    rows_max: PositiveInt | None = Field(default=None, alias="maxRowsPerTrigger")
    bytes_max: PositiveInt | None = Field(default=None, alias="maxBytesPerTrigger")
    reader_name: Annotated[str | None, AfterValidator(_reader_name)] = Field(default=None, alias="readerName")
    raw: bool = False

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> ReadOptions:
        """Return the options of a `load()`.

        :raises TailraceError: `CONFIG_INVALID`; for an unknown option with the nearest known one.
        """
        found = by_spelling(cls, given, _invalid)
        if not found.get("path"):
            raise _invalid(
                "no path is given", 'name the log\'s directory: .option("path", "…") or .load("…")'
            )
        try:
            return cls.model_validate(found)
        except ValidationError as error:
            problems = from_pydantic(error, cls, ())
            raise _invalid(
                ", ".join(f"the option {one.place} is {found[one.place]!r}" for one in problems),
                "; ".join(f"{one.place} {one.message}" for one in problems),
            ) from None

    @field_validator(*HandlingModes.model_fields, mode="before")
    @classmethod
    def _in_lower_case(cls, value: str) -> str:
        return value.lower()

    @model_validator(mode="after")
    def _modes_are_of_rows(self) -> Self:
        modes = [name for name in HandlingModes.model_fields if name in self.model_fields_set]
        if modes and self.table is None:
            raise _invalid(
                f"the option {to_camel(modes[0])} is set, but the option table is not",
                "envelopes contain PostgreSQL's text in every mode: name a table, or remove the option",
            )
        return self

    def refuse_limits(self) -> None:
        """Refuse the options of a stream, which a batch would ignore.

        :raises TailraceError: `CONFIG_INVALID`.
        """
        for name in ("maxRowsPerTrigger", "maxBytesPerTrigger", "readerName"):
            if name in self.model_dump(by_alias=True, exclude_none=True):
                raise _invalid(
                    f"{name} is an option of streams, and this is one batch",
                    "leave it out, or use startingOffset and endingOffset",
                )

    def refuse_ending(self) -> None:
        """Refuse the option of a batch, which a stream would ignore.

        :raises TailraceError: `CONFIG_INVALID`.
        """
        if self.ending != "latest":
            raise _invalid(
                "endingOffset is an option of batches, and this is a stream",
                "leave it out; .trigger(availableNow=True) stops at the log's current end",
            )
