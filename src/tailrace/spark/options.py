"""The options of `format("tailrace")`, checked as a whole before anything is read."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import unquote, urlsplit

from tailrace.errors import Kind, TailraceError

#: Every option, in its public spelling, and whether it is for batch, streaming or both.
#: Spark hands keys over in lower case, so case never matters.
OPTIONS: dict[str, str] = {
    "path": "both",
    "task": "both",
    "table": "both",
    "startingOffset": "both",
    "endingOffset": "batch",
    "maxRowsPerTrigger": "streaming",
    "maxBytesPerTrigger": "streaming",
    "readerName": "streaming",
    "raw": "both",
}
_BY_KEY = {name.lower(): name for name in OPTIONS}


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What a reader was asked for.

    `starting` and `ending` are places in the log as written: `earliest`, `latest`, a log
    offset, an LSN or a time; `position.resolve` finds them. `task` is "" if none was named. `raw`
    asks for what the log holds, without the masks and left-out columns of its pipeline.
    """

    path: str
    task: str
    table: str | None
    starting: str
    ending: str
    rows_max: int | None
    bytes_max: int | None
    reader_name: str | None
    raw: bool

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> ReadOptions:
        """Return the options of a `load()`.

        :raises TailraceError: `CONFIG_INVALID`, for an unknown option with the nearest known.
        """
        values: dict[str, str] = {}
        for key, value in given.items():
            if (name := _BY_KEY.get(key.lower())) is None:
                _refuse_unknown(key)
            values[name] = value
        if not values.get("path"):
            raise TailraceError(
                Kind.CONFIG_INVALID,
                "read a change log: no path is given",
                'name the log\'s directory: .option("path", "…") or .load("…")',
            )
        table = values.get("table")
        if table is not None and not all(table.partition(".")[::2]):
            raise TailraceError(
                Kind.CONFIG_INVALID,
                f"read a change log: the option table is {table!r}",
                "write it as schema.table, without quotes, in the database's own spelling",
            )
        return cls(
            path=local_path(values["path"]),
            task=values.get("task", ""),
            table=table,
            starting=values.get("startingOffset", "earliest"),
            ending=values.get("endingOffset", "latest"),
            rows_max=_positive(values, "maxRowsPerTrigger"),
            bytes_max=_positive(values, "maxBytesPerTrigger"),
            reader_name=values.get("readerName") or None,
            raw=_flag(values, "raw"),
        )

    def refuse_limits(self) -> None:
        """Refuse the options of a stream, which a batch would pass over in silence.

        :raises TailraceError: `CONFIG_INVALID`.
        """
        given = {
            "maxRowsPerTrigger": self.rows_max,
            "maxBytesPerTrigger": self.bytes_max,
            "readerName": self.reader_name,
        }
        for name, value in given.items():
            if value is not None:
                raise TailraceError(
                    Kind.CONFIG_INVALID,
                    f"read a change log in one batch: {name} is an option of streams",
                    "leave it out, or use startingOffset and endingOffset",
                )

    def refuse_ending(self) -> None:
        """Refuse the option of a batch, which a stream would pass over in silence.

        :raises TailraceError: `CONFIG_INVALID`.
        """
        if self.ending != "latest":
            raise TailraceError(
                Kind.CONFIG_INVALID,
                "read a change log as a stream: endingOffset is an option of batches",
                "leave it out; .trigger(availableNow=True) stops at what the log holds now",
            )


def local_path(text: str) -> str:
    """Return an absolute path for a path or a `file:` URL."""
    if text.startswith("file:"):
        text = unquote(urlsplit(text).path)
    return os.path.abspath(text)


def _refuse_unknown(key: str) -> NoReturn:
    near = difflib.get_close_matches(key.lower(), _BY_KEY, n=1)
    known = ", ".join(OPTIONS)
    raise TailraceError(
        Kind.CONFIG_INVALID,
        f"read a change log: {key!r} is not an option",
        f"did you mean {_BY_KEY[near[0]]}?" if near else f"the options are {known}",
    )


def _positive(values: Mapping[str, str], name: str) -> int | None:
    if name not in values:
        return None
    try:
        number = int(values[name])
    except ValueError:
        number = 0
    if number < 1:
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"read a change log: the option {name} is {values[name]!r}",
            "give a whole number above 0",
        )
    return number


def _flag(values: Mapping[str, str], name: str) -> bool:
    value = values.get(name, "false").lower()
    if value not in ("true", "false"):
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"read a change log: the option {name} is {values[name]!r}",
            "give true or false",
        )
    return value == "true"
