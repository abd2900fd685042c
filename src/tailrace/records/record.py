"""One record of a batch, for those who take them one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tailrace.records.group import NOT_MADE, Group

_NOTHING: Mapping[str, Any] = {}
_REPLACEABLE = {"topic", "key", "before", "after", "value", "headers"}


class Record:
    """A view of one row of a group. Values are Python's own, made when they are asked for.

    :param replaced: what `replace` was given: the record differs from its row in this.
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
        # No values: records end up in logs.
        return f"<Record {self.place} of {self.topic}>"

    @property
    def topic(self) -> str:
        """Where it goes."""
        found: str = self.replaced.get("topic", self.group.topic)
        return found

    @property
    def place(self) -> int:
        """Its place in the batch that was polled."""
        return int(self.group.index[self.row])

    @property
    def op(self) -> str | None:
        """What the change did: `r`, `c`, `u`, `d`, `t`, `m`; None if the record is no change."""
        found: str | None = self._get("op")
        return found

    @property
    def key(self) -> Any:
        """The key's columns by name; None without a key."""
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
            # Most of what reading a record costs here is calling: what is made is looked up without it.
            made = self.group.made.get("after")
            if made is not None and (found := made[self.row]) is not NOT_MADE:
                return found
        found = self._get("after")
        return found

    @property
    def value(self) -> Any:
        """What a transformation made of the change; the change itself where none did."""
        if "value" in self.replaced or not self.group.is_change:
            return self._get("value")
        return {name: self._get(name) for name in ("before", "after", "source", "op")}

    @property
    def source(self) -> Mapping[str, Any]:
        """Where the change comes from."""
        return self._get("source") or {}

    @property
    def unchanged(self) -> tuple[str, ...]:
        """Columns whose value was not sent, because it is stored apart and did not change."""
        return tuple(self._get("unchanged") or ())

    @property
    def headers(self) -> Mapping[str, Any]:
        """Headers by name; those that are null are left out."""
        found = self._get("headers") or {}
        return {name: value for name, value in found.items() if value is not None}

    def replace(self, **changes: Any) -> Record:
        """Return the record with something else in it: what a record transformation returns.

        :param changes: `topic`, a text; `key`, `before`, `after` and `value`, mappings by name (`key`
            and `value` also plain values), or None; `headers`, a mapping. A change that is given a
            `value` is no change any more: it has no rows before and after.
        :raises TypeError: if something else is named.
        """
        if unknown := changes.keys() - _REPLACEABLE:
            raise TypeError(f"a record has no {', '.join(sorted(unknown))} that can be replaced")
        return Record(self.group, self.row, self.partition, {**self.replaced, **changes})

    def _get(self, name: str) -> Any:
        if name in self.replaced:
            return self.replaced[name]
        return self.group.value_at(name, self.row)
