"""The contract of converters. Third parties implement it; found by the entry point `tailrace.converters`."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from tailrace.records.events import Converted, EventKeys
from tailrace.records.group import Group


@runtime_checkable
class Converter(Protocol):
    """Converts groups of records to the keys, values and headers that are sent.

    Runs in process, on several threads at once, and on Spark's executors: it is created from its options,
    can be pickled, and keeps no necessary state between calls.
    """

    def convert(self, group: Group) -> Converted:
        """Return the records' events, in the group's order.

        A record may become several events, or none: `Converted.rows` has the record of each event.
        A group whose `wire` is set is best converted directly from it.
        :raises TailraceError: stops the task; neither this group nor a later one is committed.
        :raises RetriableError: the group is converted again after a while.
        :raises StopEngine: ends the engine; no record of the batch counts as processed.
        """
        ...

    def close(self) -> None:
        """Release resources; called once, after the last `convert`."""
        ...


@runtime_checkable
class ChecksAhead(Protocol):
    """A converter that depends on a service, and can check it in advance without changing anything there."""

    def check(self) -> None:
        """Check that the service answers, and accepts the converter's credentials.

        :raises TailraceError: as `convert`.
        """
        ...

    def check_shape(self, group: Group) -> None:
        """Check that changes of this table, for this topic, can be converted; the group may have no rows.

        :raises TailraceError: as `convert`.
        """
        ...


@runtime_checkable
class KeysFirst(Protocol):
    """A converter that can compute the keys of a group's events without their values.

    If several producers share the records by their keys, each then converts its own share only.
    """

    def keys(self, group: Group) -> EventKeys:
        """Return the same keys and rows as `convert`.

        :raises TailraceError: as `convert`.
        """
        ...
