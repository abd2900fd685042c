"""Converts points in time between numbers since 1970, texts, dates, times and timestamps. All in UTC."""

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
#: Largest distance from 1970 at which `strftime` writes the year correctly, in seconds.
_YEARS_MAX_S = 30_000 * 31_556_952
_UNITS = {"unix_s": "s", "unix_ms": "ms", "unix_us": "us", "unix_ns": "ns"}


@dataclass(frozen=True, slots=True)
class Timestamps:
    """Converts columns of points in time to another form."""

    given: options.TimestampsConfig

    def apply(self, group: Group) -> list[Group]:
        """Return the records with converted columns.

        :raises TailraceError: `TRANSFORM_FAILED` if values are not points in time, or out of range.
        """
        part = self.given.apply_to
        meant = self.meant(field_names(group, part))
        if not meant:
            return [group]
        return [with_converted(group, part, meant, partial(self.converted, group))]

    def meant(self, names: Iterable[str]) -> list[str]:
        """Return those of the columns that are converted."""
        return fitting(self.given.fields, names)

    def converted(self, group: Group, _image: str, name: str, values: pa.Array) -> pa.Array:
        """Return the converted values of a column.

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
            # An infinity has no number and no formatted text: `special` has it, unless the column was text.
            known = finite(times)
            if pa.types.is_string(arrow) and known.null_count > times.null_count:
                raise pa.ArrowInvalid
            return self._written(self._read(known))
        except (ExpressionError, pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
            # Arrow's own message may quote a value.
            raise failure(
                group,
                f"convert the column {name!r} from {arrow} to {self.given.to}: a value is not a point in "
                "time, or out of range",
                "check unit and read_format, or restrict the transformation by a predicate",
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
        # Arrow stores years in 16 bits.
        if pc.any(pc.greater(pc.abs(_counted(times, "s")), _YEARS_MAX_S)).as_py():
            raise pa.ArrowInvalid
        # For times with fractions, Arrow's %S would write the fraction as well.
        whole = pc.floor_temporal(times, unit="second").cast(pa.timestamp("s", tz=_UTC))
        return pc.strftime(whole, format=self.given.format)


def _parsed(texts: pa.StringArray, reading: str) -> pa.Array:
    """Return the points in time that texts represent.

    :raises pyarrow.ArrowInvalid: if a text has another format, or its month does not have that day.
    """

    def parsed(more: str, how: str) -> pa.Array:
        given = pc.binary_join_element_wise(texts, more, "") if more else texts
        return pc.strptime(given, format=reading + how, unit="us")

    # Arrow reads 30 February as 1 March. A later field overrides an earlier one: here an offset of 0, and
    # January, which has all 31 days. A different day or year shows that the month does not have the day.
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
        # Rounded down, before 1970 too.
        times = pc.floor_temporal(times, unit=names[unit])
    return times.cast(pa.timestamp(unit, tz=_UTC))


_TYPES = {"date": pa.date32(), "timestamp": _INSTANT}
_ORDER = ("s", "ms", "us", "ns")
_COARSER = {(fine, coarse) for at, fine in enumerate(_ORDER) for coarse in _ORDER[:at]}
