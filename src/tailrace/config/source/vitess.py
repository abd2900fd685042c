"""The section `source` for Vitess: vtgates, credentials, and which tables are captured."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from tailrace.config.fields import MIB, ByteCount, FileName, Text
from tailrace.config.patterns import Patterns, TablePattern, matches_any
from tailrace.config.source.section import SourceSection, is_loopback
from tailrace.secrets import Secret

_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")
#: Without dots: a table's name in a pattern begins after the first dot.
_KEYSPACE = re.compile(r"[A-Za-z0-9_-]{1,64}")


def _address(value: str) -> str:
    found = _ADDRESS.fullmatch(value)
    if found is None or not 0 < int(found["port"]) < 65536:
        raise ValueError("must be host:port of a vtgate's gRPC, such as vtgate.example.org:15991")
    return value


def _keyspace(value: str) -> str:
    if not _KEYSPACE.fullmatch(value):
        raise ValueError("must be the name of a keyspace: letters, digits, _ and -")
    return value


class VitessSource(SourceSection):
    """A keyspace of a Vitess cluster, all shards of it."""

    snapshot_has_keys_once: ClassVar[bool] = True
    reads_column_names: ClassVar[bool] = True

    type: Literal["vitess"] = Field(default="vitess", description="Kind of the source.")
    hosts: tuple[Annotated[str, AfterValidator(_address)], ...] = Field(
        min_length=1,
        description="vtgates, each as `host:port` of its gRPC. Each task uses one; the next if it can't be "
        "reached.",
    )
    keyspace: Annotated[str, AfterValidator(_keyspace)] = Field(description="Keyspace to capture.")
    tables: Patterns = Field(
        default=("*.*",),
        description="Tables to capture: `keyspace.table`, `*` for any run of characters; or "
        "`/a regular expression/` for the whole name. See [selection](selection.md).",
    )
    tables_exclude: tuple[TablePattern, ...] = Field(
        default=(), description="Tables to leave out of those that `tables` matches; patterns as there."
    )
    tablet_type: Literal["primary", "replica", "rdonly"] = Field(
        default="primary", description="Kind of the tablets that changes are read from."
    )
    user: Text | None = Field(default=None, description="User name for vtgate's static authentication.")
    password: Secret | None = Field(default=None, description="Its password; a reference.")
    tls: Literal["verify-full", "disable"] | None = Field(
        default=None,
        description="`verify-full`: TLS, and the certificate must be the host's; `disable`: plain text. "
        "Default: `disable` if all hosts are this machine and no other setting of TLS is given, otherwise "
        "`verify-full`.",
    )
    tls_ca: FileName | None = Field(
        default=None, description="PEM file of trusted authorities. Default: the system's."
    )
    tls_certificate: FileName | None = Field(
        default=None, description="PEM file of the client's certificate, for mutual TLS."
    )
    tls_key: FileName | None = Field(default=None, description="PEM file of the client's key.")
    tls_server_name: str | None = Field(
        default=None, min_length=1, description="Name that the certificate must have. Default: the host's."
    )
    snapshot: Literal["initial", "never"] = Field(
        default="initial",
        description="`initial`: existing rows first, then changes; `never`: changes from now on.",
    )
    snapshot_connections: int = Field(
        default=4,
        ge=1,
        le=64,
        description="Streams that copy rows at the same time; each shard that is copied has at least one. "
        "See [snapshots](#snapshots).",
    )
    tasks_max: int = Field(
        default=1,
        ge=1,
        le=16,
        description="Tasks among which the shards are divided, each with a connection to one of `hosts`. "
        "See [tasks](#tasks).",
    )
    shard_column: str | None = Field(
        default=None,
        min_length=1,
        max_length=63,
        description="Name of a column to add to each table: the shard of the row's newest change.",
    )
    connect_timeout: float = Field(
        default=10.0, gt=0, le=600, description="Longest time for a connection or a query, in seconds."
    )
    heartbeat_interval_s: int = Field(
        default=5, ge=1, le=600, description="Seconds of silence after which vtgate sends a heartbeat."
    )
    receive_timeout_s: float = Field(
        default=60.0,
        gt=0,
        le=3600,
        description="Seconds without any message of a shard before its stream counts as dead.",
    )
    keepalive_s: float = Field(
        default=30.0, ge=10, le=3600, description="Seconds from one gRPC ping to the next."
    )
    message_bytes_max: ByteCount = Field(
        default=128 * MIB,
        ge=MIB,
        le=2047 * MIB,
        description="Largest message that is accepted from vtgate.",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.user is None) != (self.password is None):
            raise ValueError("user and password belong together: give both or none")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together: give both or none")
        if self.tls == "disable" and (self.tls_ca or self.tls_certificate or self.tls_server_name):
            raise ValueError("tls is disable, and other settings of TLS are given: take one of them out")
        if self.receive_timeout_s <= self.heartbeat_interval_s:
            raise ValueError("receive_timeout_s must be larger than heartbeat_interval_s")
        return self

    @property
    def uses_tls(self) -> bool:
        """Whether the connection uses TLS."""
        if self.tls is not None:
            return self.tls != "disable"
        names = (host.rpartition(":")[0].strip("[]") for host in self.hosts)
        given = self.tls_ca or self.tls_certificate or self.tls_server_name
        return bool(given) or not all(map(is_loopback, names))

    def captures(self, schema: str, table: str) -> bool:
        """Return whether `tables` matches this table of the keyspace and `tables_exclude` does not."""
        is_meant = schema == self.keyspace and matches_any(self.tables, schema, table)
        return is_meant and not matches_any(self.tables_exclude, schema, table)

    @property
    def connect_timeout_s(self) -> float:
        return self.connect_timeout

    @property
    def address(self) -> str:
        return f"{', '.join(self.hosts)}/{self.keyspace}"

    @property
    def partition(self) -> dict[str, str]:
        return {"keyspace": self.keyspace}
