"""Points in time from one form to another: counted since 1970, text, dates and times. All in UTC."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.config.transformations import options
from tailrace.decode.values.stamps import finite, stamp_texts, with_infinities
from tailrace.expressions.language import ExpressionError
from tailrace.records.group import Group
from tailrace.transforms.fields import failure, field_names, fitting, with_converted
from tailrace.transforms.groups.values import cast

_UTC = "UTC"
_INSTANT = pa.timestamp("us", tz=_UTC)
_ISO_DIGITS = 6
#: So far from 1970 `strftime` knows the year.
_YEARS_MAX_S = 30_000 * 31_556_952
_UNITS = {"unix_s": "s", "unix_ms": "ms", "unix_us": "us", "unix_ns": "ns"}


@dataclass(frozen=True, slots=True)
class Timestamps:
    """Gives columns of points in time another form."""

    given: options.TimestampsConfig

    def apply(self, group: Group) -> list[Group]:
        """Return the records with the columns in the other form.

        :raises TailraceError: `TRANSFORM_FAILED` if values are no points in time, or out of range.
        """
        part = self.given.apply_to
        meant = self.meant(field_names(group, part))
        if not meant:
            return [group]
        return [with_converted(group, part, meant, partial(self.converted, group))]

    def meant(self, names: Iterable[str]) -> list[str]:
        """Return those of the columns that get another form."""
        return fitting(self.given.fields, names)

    def converted(self, group: Group, _image: str, name: str, values: pa.Array) -> pa.Array:
        """Return values of a column as they are to be.

        :raises TailraceError: as `apply`.
        """
        arrow = values.type
        if pa.types.is_null(arrow):
            return values
        try:
            times = self._read(values) if pa.types.is_string(arrow) else values
            if not (pa.types.is_date32(times.type) or pa.types.is_timestamp(times.type)):
                return self._written(self._read(times))
            if self.given.to in _TYPES:
                return with_infinities(times, _TYPES[self.given.to], lambda v: self._written(self._read(v)))
            # An infinity has no number and no such text: `special` says what it was, unless that was a text.
            known = finite(times)
            if pa.types.is_string(arrow) and known.null_count > times.null_count:
                raise pa.ArrowInvalid
            return self._written(self._read(known))
        except (ExpressionError, pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
            # Arrow's own message may quote a value.
            raise failure(
                group,
                f"convert the column {name!r} from {arrow} to {self.given.to}: a value is no point in time, "
                "or out of range",
                "check unit and read_format, or give it only the records that it is for, by a predicate",
            ) from None

    def _read(self, values: pa.Array) -> pa.Array:
        arrow = values.type
        if pa.types.is_timestamp(arrow):
            return values if arrow.tz else values.cast(pa.timestamp(arrow.unit, tz=_UTC))
        if pa.types.is_integer(arrow):
            return values.cast(pa.int64()).cast(pa.timestamp(self.given.unit, tz=_UTC))
        if pa.types.is_date(arrow):
            return values.cast(pa.timestamp("us")).cast(_INSTANT)
        if pa.types.is_string(arrow) and self.given.read_format:
            return _parsed(values, self.given.read_format).cast(_INSTANT)
        if pa.types.is_string(arrow):
            return cast(values, "TIMESTAMPTZ")
        raise pa.ArrowTypeError

    def _written(self, times: pa.Array) -> pa.Array:
        to = self.given.to
        if to in _UNITS:
            return _counted(times, _UNITS[to])
        if to == "date":
            return pc.floor_temporal(_instants(times), unit="day").cast(pa.date32())
        if to == "time":
            return _instants(times).cast(pa.time64("us"))
        if to == "timestamp":
            return _instants(times)
        if not self.given.format:
            return stamp_texts(_instants(times), _ISO_DIGITS)
        # Arrow's years have 16 bits.
        if pc.any(pc.greater(pc.abs(_counted(times, "s")), _YEARS_MAX_S)).as_py():
            raise pa.ArrowInvalid
        # Arrow writes the fraction of a second with its second, if there is one.
        whole = pc.floor_temporal(times, unit="second").cast(pa.timestamp("s", tz=_UTC))
        return pc.strftime(whole, format=self.given.format)


def _parsed(texts: pa.StringArray, reading: str) -> pa.Array:
    """Return the points in time that texts say.

    :raises pyarrow.ArrowInvalid: if a text has another form, or its month has no such day.
    """

    def parsed(more: str, how: str) -> pa.Array:
        given = pc.binary_join_element_wise(texts, more, "") if more else texts
        return pc.strptime(given, format=reading + how, unit="us")

    # Arrow takes 30 February for 1 March. What is read later counts: here an offset of none, and January, in
    # which each day of a month is the one that was read.
    local, in_january = parsed(" +0000", " %z"), parsed(" +0000 1", " %z %m")
    for part in (pc.day, pc.year):
        if pc.any(pc.not_equal(part(local), part(in_january))).as_py():
            raise pa.ArrowInvalid
    return parsed("", "") if "%z" in reading else local.cast(pa.timestamp("us"))


def _instants(times: pa.Array) -> pa.Array:
    return _in_unit(times, "us")


def _counted(times: pa.Array, unit: str) -> pa.Array:
    return _in_unit(times, unit).cast(pa.int64())


def _in_unit(times: pa.Array, unit: str) -> pa.Array:
    if times.type.unit != unit and (times.type.unit, unit) in _COARSER:
        names = {"s": "second", "ms": "millisecond", "us": "microsecond"}
        # Down, also before 1970.
        times = pc.floor_temporal(times, unit=names[unit])
    return times.cast(pa.timestamp(unit, tz=_UTC))


_TYPES = {"date": pa.date32(), "timestamp": _INSTANT}
_ORDER = ("s", "ms", "us", "ns")
_COARSER = {(fine, coarse) for at, fine in enumerate(_ORDER) for coarse in _ORDER[:at]}
