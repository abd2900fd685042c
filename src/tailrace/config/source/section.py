"""The settings of the section `source` that every type of source has."""

from __future__ import annotations

import ipaddress
from typing import ClassVar, Self

from pydantic import Field, model_validator

from tailrace.config.source.column_policy import ColumnPolicy
from tailrace.config.values import ValueHandling


class SourceSection(ValueHandling, ColumnPolicy):
    """Settings that every source has; a type of source adds its own in a subclass.

    A subclass gives `type` its only value. The section is validated before any connection, and passed to
    executors as JSON, with references to secrets unresolved.
    """

    #: Whether a snapshot in the log has each key of a table once, so that mirrors need not search it for
    #: duplicates. If it may have a key several times, the last row counts.
    snapshot_has_keys_once: ClassVar[bool] = False
    #: Whether capture reads the names of columns from the server, and stores the column policy after them.
    reads_column_names: ClassVar[bool] = False

    type: str = Field(description="Kind of the source.")
    reconnect_delay_s: float = Field(
        default=0.5, gt=0, le=60, description="First wait before connecting again, in seconds."
    )
    reconnect_delay_s_max: float = Field(
        default=30.0, gt=0, le=3600, description="Longest wait before connecting again, in seconds."
    )
    reconnect_s_max: float = Field(
        default=600.0,
        ge=0,
        description="Seconds without a connection before the run fails; 0: no limit.",
    )

    @model_validator(mode="after")
    def _delays_fit(self) -> Self:
        if self.reconnect_delay_s > self.reconnect_delay_s_max:
            raise ValueError("reconnect_delay_s must not be larger than reconnect_delay_s_max")
        return self

    @property
    def source_name(self) -> str:
        """The name among several sources; empty for the only one."""
        return str(getattr(self, "name", ""))

    @property
    def awaited_policy(self) -> ColumnPolicy | None:
        """The column policy that capture must have stored before sinks read; None: they need not wait."""
        return self.disclosure if self.reads_column_names and not self.discloses_all else None

    @property
    def connect_timeout_s(self) -> float:
        """Longest time for a connection, in seconds."""
        return 10.0

    @property
    def address(self) -> str:
        """The source's address, for messages: without user or secrets, with references unresolved."""
        return self.type

    @property
    def partition(self) -> dict[str, str]:
        """The identity of this source in an engine's offsets, in addition to the pipeline's name."""
        return {"source": self.type}

    def captures(self, schema: str, table: str) -> bool:
        """Return whether a table is captured, according to the settings alone."""
        return False

    def for_pipeline(self, _name: str) -> Self:
        """Return the section with the defaults that depend on the name of its pipeline."""
        return self


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address is a loopback name or address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
