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

#: A file system takes names of 255; what is put before and behind needs some of them.
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
    """Return what is given by the options' own spelling: a field's alias, else its name in camel case.

    Spark hands keys over in lower case, so case never matters.

    :param invalid: makes the error of what was found and a hint.
    :param also: what options there are beside the model's, for the hint.
    :param but: fields of the model that are no options.
    :raises TailraceError: for an unknown option, with the nearest known.
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
    """Return an absolute path for a path or a `file:` URL."""
    if text.startswith("file:"):
        text = unquote(urlsplit(text).path)
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
            f"the option readerName has {len(text)} characters, and a file is named after it",
            f"give a shorter one, of at most {_READER_NAME_CHARS_MAX} letters and digits",
        )
    return text or None


class ReadOptions(HandlingModes):
    """What a reader was asked for. A field's alias, else its name in camel case, is the option's spelling.

    `starting` and `ending` are places in the log as written: `earliest`, `latest`, a log
    offset, an LSN or a time; `position.resolve` finds them. `task` is "" if none was named. `raw`
    asks for what the log holds, without the masks and left-out columns of its pipeline.
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

        :raises TailraceError: `CONFIG_INVALID`, for an unknown option with the nearest known.
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
                f"there is the option {to_camel(modes[0])}, and no option table",
                "envelopes hold PostgreSQL's own text whatever the mode: name a table, or leave it out",
            )
        return self

    def refuse_limits(self) -> None:
        """Refuse the options of a stream, which a batch would pass over in silence.

        :raises TailraceError: `CONFIG_INVALID`.
        """
        for name in ("maxRowsPerTrigger", "maxBytesPerTrigger", "readerName"):
            if name in self.model_dump(by_alias=True, exclude_none=True):
                raise _invalid(
                    f"{name} is an option of streams, and this is one batch",
                    "leave it out, or use startingOffset and endingOffset",
                )

    def refuse_ending(self) -> None:
        """Refuse the option of a batch, which a stream would pass over in silence.

        :raises TailraceError: `CONFIG_INVALID`.
        """
        if self.ending != "latest":
            raise _invalid(
                "endingOffset is an option of batches, and this is a stream",
                "leave it out; .trigger(availableNow=True) stops at what the log holds now",
            )
