"""The converters `arrow`, `python` and `bytes`: records as Arrow arrays, Python objects or given bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import pyarrow as pa

from tailrace.config.converters import NativeOptions
from tailrace.converters.factory import checked
from tailrace.converters.headers import headers_of
from tailrace.errors import Kind, TailraceError
from tailrace.records.events import Converted
from tailrace.records.group import Group
from tailrace.records.record import Record


class ArrowConverter:
    """The converter `arrow`: values are a struct array of the group's columns (`records.group.ENVELOPE`), or
    the column `value` of a transformation.

    :raises TailraceError: `CONFIG_INVALID` for any option: it has none.
    """

    def __init__(self, **options: Any) -> None:
        checked(NativeOptions, "arrow", options)

    def convert(self, group: Group) -> Converted:
        """Return the group's columns, without copying."""
        key = group.column("key")
        if group.is_change:
            columns = group.columns
            names = [name for name in columns.schema.names if name != "headers"]
            values = pa.StructArray.from_arrays([columns.column(name) for name in names], names)
        else:
            values = group.column("value")
        return Converted(None if pa.types.is_null(key.type) else key, values, headers_of(group))

    def close(self) -> None:
        """Do nothing: the converter holds no resources."""


class PythonConverter:
    """The converter `python`: keys and values are Python objects, created on access; a change is a dict
    of `before`, `after`, `source` and `op`.

    :raises TailraceError: `CONFIG_INVALID` for any option: it has none.
    """

    def __init__(self, **options: Any) -> None:
        checked(NativeOptions, "python", options)

    def convert(self, group: Group) -> Converted:
        """Return sequences that create each object on access."""
        return Converted(_Objects(group, "key"), _Objects(group, "value"), headers_of(group))

    def close(self) -> None:
        """Do nothing: the converter holds no resources."""


class BytesConverter:
    """The converter `bytes`: keys and values of a source that delivers bytes, unchanged.

    :raises TailraceError: `CONFIG_INVALID` for any option: it has none.
    """

    def __init__(self, **options: Any) -> None:
        checked(NativeOptions, "bytes", options)

    def convert(self, group: Group) -> Converted:
        """Return the columns `key` and `value`.

        :raises TailraceError: `CONVERSION_FAILED` if they are not bytes.
        """
        return Converted(_bytes_of(group, "key"), _bytes_of(group, "value"), headers_of(group))

    def close(self) -> None:
        """Do nothing: the converter holds no resources."""


def _bytes_of(group: Group, name: str) -> pa.Array:
    if group.is_change:
        kind = "rows of a table"
    else:
        column = group.column(name)
        if pa.types.is_binary(column.type) or pa.types.is_null(column.type):
            return column.cast(pa.binary())
        kind = str(column.type)
    raise TailraceError(
        Kind.CONVERSION_FAILED,
        f"convert records of {group.topic}: their {name} is {kind}, not bytes",
        "use another converter, such as json",
        {"topic": group.topic},
    )


class _Objects(Sequence[Any]):
    """A sequence of one member (`key`, `value`) of each record of a group."""

    def __init__(self, group: Group, member: str) -> None:
        self._group = group
        self._member = member

    def __len__(self) -> int:
        return len(self._group)

    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Any]: ...
    def __getitem__(self, place: int | slice) -> Any:
        if isinstance(place, slice):
            return [self[row] for row in range(*place.indices(len(self)))]
        row = range(len(self))[place]
        return getattr(Record(self._group, row, {}), self._member)
