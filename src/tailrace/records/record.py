"""A single record of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tailrace.records.group import NOT_MADE, Group

_NOTHING: Mapping[str, Any] = {}
_REPLACEABLE = {"topic", "key", "before", "after", "value", "headers"}


class Record:
    """A view of one row of a group. Values are Python objects, which are made when they are read.

    :param replaced: the fields that `replace` has set, in which the record differs from its row.
    """

    __slots__ = ("group", "partition", "replaced", "row")

    def __init__(
        self,
        group: Group,
        row: int,
        partition: Mapping[str, str],
        replaced: Mapping[str, Any] = _NOTHING,
    ) -> None:
        self.group = group
        self.row = row
        self.partition = partition
        self.replaced = replaced

    def __repr__(self) -> str:
        # Without values, because records may be logged.
        return f"<Record {self.place} of {self.topic}>"

    @property
    def topic(self) -> str:
        """The topic that the record is sent to."""
        found: str = self.replaced.get("topic", self.group.topic)
        return found

    @property
    def place(self) -> int:
        """The record's place in the batch that was polled."""
        return int(self.group.index[self.row])

    @property
    def op(self) -> str | None:
        """The operation: `r`, `c`, `u`, `d`, `t`, `m`; None if the record is not a change."""
        found: str | None = self._get("op")
        return found

    @property
    def key(self) -> Any:
        """The key's columns by name; None if there is no key."""
        return self._get("key")

    @property
    def before(self) -> Mapping[str, Any] | None:
        """The row before, as far as it was sent."""
        found: Mapping[str, Any] | None = self._get("before")
        return found

    @property
    def after(self) -> Mapping[str, Any] | None:
        """The row after; a value that was not sent is None, its name in `unchanged`."""
        found: Mapping[str, Any] | None
        if not self.replaced:
            # Calls are most of the cost of reading a record: a value that is made already is read without.
            made = self.group.made.get("after")
            if made is not None and (found := made[self.row]) is not NOT_MADE:
                return found
        found = self._get("after")
        return found

    @property
    def value(self) -> Any:
        """The value that a transformation made from the change; the change itself if none did."""
        if "value" in self.replaced or not self.group.is_change:
            return self._get("value")
        return {name: self._get(name) for name in ("before", "after", "source", "op")}

    @property
    def source(self) -> Mapping[str, Any]:
        """The origin of the change, such as its table and position."""
        return self._get("source") or {}

    @property
    def unchanged(self) -> tuple[str, ...]:
        """Columns whose value was not sent, because it is stored out of line and did not change."""
        return tuple(self._get("unchanged") or ())

    @property
    def headers(self) -> Mapping[str, Any]:
        """Headers by name, without those that are null."""
        found = self._get("headers") or {}
        return {name: value for name, value in found.items() if value is not None}

    def replace(self, **changes: Any) -> Record:
        """Return the record with some fields replaced, for a record transformation to return.

        :param changes: `topic`, a text; `key`, `before`, `after` and `value`, mappings by name (`key`
            and `value` also plain values), or None; `headers`, a mapping. A change whose `value` is set
            is no longer a change: it has no rows before and after.
        :raises TypeError: for any other name.
        """
        if unknown := changes.keys() - _REPLACEABLE:
            raise TypeError(f"a record has no {', '.join(sorted(unknown))} that can be replaced")
        return Record(self.group, self.row, self.partition, {**self.replaced, **changes})

    def _get(self, name: str) -> Any:
        if name in self.replaced:
            return self.replaced[name]
        return self.group.value_at(name, self.row)
