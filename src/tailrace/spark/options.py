"""The options of `format("tailrace")`, checked as a whole before anything is read."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, get_args
from urllib.parse import unquote, urlsplit

from tailrace.config import values
from tailrace.errors import Kind, TailraceError
from tailrace.model import ValueModes

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
    "decimalHandlingMode": "both",
    "timePrecisionMode": "both",
    "intervalHandlingMode": "both",
    "binaryHandlingMode": "both",
    "hstoreHandlingMode": "both",
    "moneyFractionDigits": "both",
}
_BY_KEY = {name.lower(): name for name in OPTIONS}

#: Debezium's handling modes: the field of `ValueModes` and what it may be.
_MODES = {
    "decimalHandlingMode": ("decimal", get_args(values.Decimal)),
    "timePrecisionMode": ("time", get_args(values.Time)),
    "intervalHandlingMode": ("interval", get_args(values.Interval)),
    "binaryHandlingMode": ("binary", get_args(values.Binary)),
    "hstoreHandlingMode": ("hstore", get_args(values.Hstore)),
    "moneyFractionDigits": ("money_fraction_digits", tuple(str(digits) for digits in range(11))),
}


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
    modes: ValueModes

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> ReadOptions:
        """Return the options of a `load()`.

        :raises TailraceError: `CONFIG_INVALID`, for an unknown option with the nearest known.
        """
        found: dict[str, str] = {}
        for key, value in given.items():
            if (name := _BY_KEY.get(key.lower().replace("_", ""))) is None:
                _refuse_unknown(key)
            found[name] = value
        if not found.get("path"):
            raise TailraceError(
                Kind.CONFIG_INVALID,
                "read a change log: no path is given",
                'name the log\'s directory: .option("path", "…") or .load("…")',
            )
        table = found.get("table")
        if table is not None and not all(table.partition(".")[::2]):
            raise TailraceError(
                Kind.CONFIG_INVALID,
                f"read a change log: the option table is {table!r}",
                "write it as schema.table, without quotes, in the database's own spelling",
            )
        return cls(
            path=local_path(found["path"]),
            task=found.get("task", ""),
            table=table,
            starting=found.get("startingOffset", "earliest"),
            ending=found.get("endingOffset", "latest"),
            rows_max=_positive(found, "maxRowsPerTrigger"),
            bytes_max=_positive(found, "maxBytesPerTrigger"),
            reader_name=found.get("readerName") or None,
            raw=_flag(found, "raw"),
            modes=_modes(found, rows=table is not None),
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


def _modes(given: Mapping[str, str], *, rows: bool) -> ValueModes:
    chosen: dict[str, Any] = {}
    for name, (field, possible) in _MODES.items():
        if name not in given:
            continue
        if not rows:
            raise TailraceError(
                Kind.CONFIG_INVALID,
                f"read a change log: there is the option {name}, and no option table",
                "envelopes hold PostgreSQL's own text whatever the mode: name a table, or leave it out",
            )
        value = given[name].lower()
        if value not in possible:
            raise TailraceError(
                Kind.CONFIG_INVALID,
                f"read a change log: the option {name} is {given[name]!r}",
                f"give one of {', '.join(possible)}",
            )
        chosen[field] = int(value) if value.isdigit() else value
    return ValueModes(**chosen)


def _positive(given: Mapping[str, str], name: str) -> int | None:
    if name not in given:
        return None
    try:
        number = int(given[name])
    except ValueError:
        number = 0
    if number < 1:
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"read a change log: the option {name} is {given[name]!r}",
            "give a whole number above 0",
        )
    return number


def _flag(given: Mapping[str, str], name: str) -> bool:
    value = given.get(name, "false").lower()
    if value not in ("true", "false"):
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"read a change log: the option {name} is {given[name]!r}",
            "give true or false",
        )
    return value == "true"
