"""What a converter is. Third parties implement it; found by the entry point `tailrace.converters`."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from tailrace.records.events import Converted, EventKeys
from tailrace.records.group import Group


@runtime_checkable
class Converter(Protocol):
    """Makes of a group of records keys, values and headers as they go out.

    Runs in process, on several threads at once, and on Spark's executors: made of its options, it
    pickles and keeps nothing that matters from call to call.
    """

    def convert(self, group: Group) -> Converted:
        """Return the records' events, in the group's order.

        A record may become several events, or none: `Converted.rows` says which came from which.
        A group whose `wire` is set is best written straight from it.
        :raises TailraceError: stops the task; nothing is committed beyond the group.
        :raises RetriableError: the group is converted again after a while.
        :raises StopEngine: ends the engine; nothing of the batch counts as processed.
        """
        ...

    def close(self) -> None:
        """Let go of what is held; called once, after the last `convert`."""
        ...


@runtime_checkable
class ChecksAhead(Protocol):
    """A converter that depends on somebody else, and can ask there beforehand. Nothing is changed by that."""

    def check(self) -> None:
        """Ask whether that one answers, and lets the converter in.

        :raises TailraceError: what `convert` would.
        """
        ...

    def check_shape(self, group: Group) -> None:
        """Ask whether changes of this table, for this topic, could go out; the group may have no rows.

        :raises TailraceError: what `convert` would.
        """
        ...


@runtime_checkable
class KeysFirst(Protocol):
    """A converter that can tell the keys of a group's events without making their values.

    Where several producers share the records by their keys, each then converts its own share alone.
    """

    def keys(self, group: Group) -> EventKeys:
        """Return exactly the keys and rows that `convert` would.

        :raises TailraceError: as `convert`.
        """
        ...
