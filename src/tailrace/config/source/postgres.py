"""The section `source` for PostgreSQL: libpq's options under their own names, and Tailrace's.

No reference is resolved when the file is read. `conninfo` composes the connection string at the
moment of connecting; it is the only place where a password exists in memory, and its result must
not be logged, stored or put into an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, ValidationInfo, model_validator

from tailrace.config.fields import MIB, ByteCount, Section
from tailrace.config.patterns import (
    Patterns,
    PrefixPattern,
    TablePattern,
    matches,
    matches_any,
    matches_any_prefix,
)
from tailrace.config.source.libpq import OPTIONAL_FILES, OWN_OPTIONS, LibpqOptions, parse_dsn, secret_options
from tailrace.config.source.section import SourceSection, is_loopback
from tailrace.errors import Kind, TailraceError
from tailrace.secrets import Secret, anchored, check_references, is_reference, remember, resolved

#: Longest name of a slot in PostgreSQL, in bytes.
SLOT_BYTES_MAX = 63
SLOT_NAME = re.compile(rf"[a-z0-9_]{{1,{SLOT_BYTES_MAX}}}")


def _dsn(value: object, info: ValidationInfo) -> object:
    if isinstance(value, Secret):
        return value
    if not isinstance(value, str):
        raise ValueError("must be a connection string in quotes")
    check_references(value)
    value = anchored(value, (info.context or {}).get("base"))
    if is_reference(value):
        return Secret(value)
    options = parse_dsn(value)
    if options is None:
        raise ValueError(
            "is not a connection string that libpq understands: write "
            "postgresql://user@host:port/dbname, and give the password in the field password"
        )
    for name in sorted(secret_options()):
        if name in options and not is_reference(options[name]):
            raise ValueError(
                f"contains a {name}: remove it and add the key "
                f"{name}: ${{env:NAME}} or {name}: ${{file:/path}} next to dsn"
            )
    for name in OWN_OPTIONS:
        if name in options:
            raise ValueError(f"sets {name}: remove it, {OWN_OPTIONS[name]}")
    return value


def _slot_name(value: str) -> str:
    if value and not SLOT_NAME.fullmatch(value):
        raise ValueError("must be 1 to 63 of the characters a-z, 0-9 and _")
    return value


def slot_named_after(pipeline: str) -> str:
    """Return the name that a pipeline's slot and publication have if the file names none."""
    return "tailrace_" + re.sub(r"[^a-z0-9_]", "_", pipeline.lower())


def _source_name(value: str) -> str:
    # Without dots: so the folder of a source differs from those of tables, `<schema>.<table>`.
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,51}", value):
        raise ValueError("must be 1 to 52 letters, digits, _ or -, with a letter or digit first")
    if value.lower() == "lock":
        raise ValueError("must not be lock, which is a file in log.path: choose another name")
    return value


def _replica_identity(value: str) -> str:
    word, _, index = value.partition(" ")
    if value not in ("default", "full") and not (word == "index" and index.strip()):
        raise ValueError("must be default, full, or index NAME")
    return value if word != "index" else f"index {index.strip()}"


def _publication_name(value: str) -> str:
    if len(value.encode()) > 63 or "\0" in value:
        raise ValueError("must be at most 63 bytes")
    return value


SourceName = Annotated[str, AfterValidator(_source_name)]
Dsn = Annotated[str | Secret, BeforeValidator(_dsn), PlainSerializer(str, return_type=str)]


class HeartbeatConfig(Section):
    """How the slot's position follows the server while there are no changes for this pipeline."""

    interval_s: float = Field(
        default=10.0,
        gt=0,
        le=3600,
        description="Seconds after which the acknowledged position follows an idle server, and from one "
        "`action` or `query` to the next.",
    )
    action: Literal["keepalive", "message", "transaction"] = Field(
        default="keepalive",
        description="`keepalive`: the server's own keepalives are acknowledged, nothing is written; "
        "`message`: also write a logical message (`pg_logical_emit_message`) outside transactions; "
        "`transaction`: as `message`, in a transaction. A standby can't write: there it is `keepalive`.",
    )
    query: str | None = Field(
        default=None,
        min_length=1,
        max_length=10_000,
        description="SQL to run instead of `action`, such as an `UPDATE` of your own table. Names in it "
        "need their schema. It can't write to captured tables. If it changes no row, there is a warning.",
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if self.query is not None and self.action != "keepalive":
            raise ValueError("action and query exclude each other: remove one of them")
        return self

    @property
    def writes(self) -> bool:
        """Whether a heartbeat writes to the source."""
        return self.query is not None or self.action != "keepalive"


class SlotWatchConfig(Section):
    """Monitoring of the slot while the pipeline runs."""

    interval_s: float = Field(
        default=10.0,
        ge=0,
        le=3600,
        description="Seconds from one check of the slot to the next, on a separate connection; 0: never.",
    )
    retained_bytes_warned: ByteCount = Field(
        default=8192 * MIB,
        ge=MIB,
        description="Warn if the server keeps more WAL than this for the slot.",
    )


class PostgresSource(SourceSection, LibpqOptions):
    """A PostgreSQL database whose changes are captured."""

    snapshot_has_keys_once: ClassVar[bool] = True
    reads_column_names: ClassVar[bool] = True

    type: Literal["postgresql"] = Field(default="postgresql", description="Kind of the source.")
    dsn: Dsn | None = Field(
        default=None,
        description="Connection string without a password; fields of this section override its options.",
    )
    tables: Patterns = Field(
        default=("public.*",),
        description="Tables to capture: `schema.table`, `*` for any run of characters; or "
        "`/a regular expression/` for the whole name. See [selection](selection.md).",
    )
    tables_exclude: tuple[TablePattern, ...] = Field(
        default=(), description="Tables to leave out of those that `tables` matches; patterns as there."
    )
    replica_identity: dict[TablePattern, Annotated[str, AfterValidator(_replica_identity)]] = Field(
        default={},
        description="Replica identity to set for captured tables at each start, by pattern of tables: "
        "`default`, `full` or `index NAME`. The role must own them. The first pattern that matches counts; "
        "other tables keep theirs.",
    )
    publish_via_partition_root: bool = Field(
        default=True,
        description="Whether a partitioned table is captured as one table, with its root's name, or as one "
        "table per partition. For publications that Tailrace creates; existing ones are not changed.",
    )
    message_prefixes: tuple[PrefixPattern, ...] = Field(
        default=("*",),
        description="Prefixes of the logical messages (`pg_logical_emit_message`, PostgreSQL 14 and later) "
        "to capture: text, `*` for any run of characters; or `/a regular expression/` for the whole prefix. "
        "`[]`: none.",
    )
    message_prefixes_exclude: tuple[PrefixPattern, ...] = Field(
        default=(),
        description="Prefixes of the logical messages to leave out; patterns as in `message_prefixes`.",
    )
    skip_unchanged_updates: bool = Field(
        default=False,
        description="Leave out updates that change no captured column. Only for tables with `REPLICA "
        "IDENTITY FULL`, whose updates send the old row.",
    )
    origin: Literal["any", "none"] = Field(
        default="any",
        description="`none`: only changes that were made on this server, not those that it replicated from "
        "another (PostgreSQL 16 and later).",
    )
    slot: Annotated[str, AfterValidator(_slot_name)] = Field(
        default="", description="Replication slot. Default: `tailrace_<name>`."
    )
    publication: Annotated[str, AfterValidator(_publication_name)] = Field(
        default="", description="Publication. Default: `tailrace_<name>`."
    )
    slot_failover: bool = Field(
        default=False,
        description="Create the slot so that standbys synchronise it and it survives a failover. "
        "PostgreSQL 17 or later.",
    )
    heartbeat: HeartbeatConfig = Field(
        default=HeartbeatConfig(), description="How the slot's position follows an idle server."
    )
    slot_watch: SlotWatchConfig = Field(default=SlotWatchConfig(), description="Monitoring of the slot.")
    snapshot: Literal["initial", "when_needed", "never", "only"] = Field(
        default="initial",
        description="`initial`: existing rows first, then changes; `when_needed`: the same, and all tables "
        "are read again when the slot has lost changes; `never`: changes from now on; `only`: existing rows, "
        "then the end.",
    )
    snapshot_connections: int = Field(
        default=4, ge=1, le=64, description="Connections that read a snapshot at the same time."
    )
    snapshot_chunk_rows: int = Field(
        default=100_000, ge=1, description="Most rows planned for a chunk of a snapshot."
    )
    snapshot_tables: Patterns | None = Field(
        default=None,
        description="Tables whose rows the initial snapshot reads, in this order of patterns; of other "
        "tables, only changes are captured. Default: all, by name.",
    )
    snapshot_where: dict[TablePattern, str] = Field(
        default={},
        description="Condition in the server's SQL, by pattern of tables: the initial snapshot reads only "
        "rows of these tables that meet it. The first pattern that matches counts.",
    )
    status_interval_s: float = Field(
        default=10.0,
        gt=0,
        le=60,
        description="Seconds between status messages to the server; a third of its `wal_sender_timeout` "
        "if that is less.",
    )
    receive_timeout_s: float = Field(
        default=60.0,
        gt=0,
        le=3600,
        description="Seconds in which the server sends nothing before the connection counts as dead.",
    )
    frame_bytes_max: ByteCount = Field(
        default=1024 * MIB,
        ge=MIB,
        le=2047 * MIB,
        description="Largest message that is accepted from the server.",
    )

    def captures(self, schema: str, table: str) -> bool:
        """Return whether `tables` matches this table and `tables_exclude` does not."""
        return matches_any(self.tables, schema, table) and not matches_any(self.tables_exclude, schema, table)

    def identity_of(self, schema: str, table: str) -> str:
        """Return the replica identity to set for the table; empty: it keeps its own."""
        found = (text for pattern, text in self.replica_identity.items() if matches(pattern, schema, table))
        return next(found, "")

    @property
    def leaves_messages_out(self) -> bool:
        """Whether logical messages may be left out by their prefix."""
        return self.message_prefixes != ("*",) or bool(self.message_prefixes_exclude)

    def captures_message(self, prefix: str) -> bool:
        """Return whether logical messages of this prefix are captured."""
        return matches_any_prefix(self.message_prefixes, prefix) and not matches_any_prefix(
            self.message_prefixes_exclude, prefix
        )

    def snapshot_place(self, schema: str, table: str) -> int | None:
        """Return the table's place in the order of the initial snapshot; None: its rows are not read."""
        if self.snapshot_tables is None:
            return 0
        places = enumerate(self.snapshot_tables)
        return next((place for place, pattern in places if matches(pattern, schema, table)), None)

    def snapshot_condition(self, schema: str, table: str) -> str:
        """Return the condition on the rows of the table that the initial snapshot reads; empty: all."""
        found = (text for pattern, text in self.snapshot_where.items() if matches(pattern, schema, table))
        return next(found, "")

    def for_pipeline(self, name: str) -> PostgresSource:
        """Return the source with its slot and publication named after pipeline `name` if unnamed."""
        default = slot_named_after(name)
        return self.model_copy(
            update={"slot": self.slot or default, "publication": self.publication or default}
        )

    def conninfo(self, defaults: Mapping[str, str] | None = None, **overrides: Any) -> str:
        """Return the connection string, with secrets resolved now; `overrides` replace the file's options,
        `defaults` are for options that it does not give.

        An override of `options` is appended to the file's own, so that it takes precedence in the session.

        :raises TailraceError: `SECRET_MISSING`; `CONFIG_INVALID` if a reference refers to
            something that is not a connection string.
        """
        from psycopg.conninfo import make_conninfo

        options = {**(defaults or {}), **self._connection_options()}
        if options.get("options") and overrides.get("options"):
            overrides["options"] = f"{options['options']} {overrides['options']}"
        options.update({name: str(value) for name, value in overrides.items() if value is not None})
        options["sslmode"] = _sslmode(options)
        if "," in (options.get("hostaddr") or options.get("host") or ""):
            # A standby that answers while the primary restarts would look like one without the slot.
            options.setdefault("target_session_attrs", "primary")
        for name in secret_options():
            remember(options.get(name, ""))
        # Without one, OpenSSL asks at the terminal for the pass phrase of an encrypted key, and waits.
        options.setdefault("sslpassword", "none")
        return make_conninfo("", **options)

    def require_files(self) -> None:
        """Check that the given files exist of which libpq would not report that they are missing.

        :raises TailraceError: `SOURCE_MISCONFIGURED`; as `conninfo`.
        """
        options = self._connection_options()
        for name in OPTIONAL_FILES:
            if (path := options.get(name)) and not os.access(path, os.R_OK):
                raise TailraceError(
                    Kind.SOURCE_MISCONFIGURED,
                    f"connect to {self.address}: the file of source.{name} does not exist or can't be read",
                    f"correct source.{name}, or remove it",
                    {"path": path},
                )

    def tls(self) -> tuple[bool, str]:
        """Return whether the server is on this machine, and the sslmode that is used.

        :raises TailraceError: as `conninfo`.
        """
        options = self._connection_options()
        return _is_local(options), _sslmode(options)

    @property
    def address(self) -> str:
        """The database's address, for messages: without user or secrets, with references unresolved."""
        known = parse_dsn(self.dsn) or {} if isinstance(self.dsn, str) else {}
        host = self.host or self.option("hostaddr") or known.get("host") or known.get("hostaddr")
        if host is None:
            host = self.dsn if isinstance(self.dsn, Secret) else "local socket"
        port = self.port or known.get("port")
        dbname = self.dbname or known.get("dbname")
        return f"{host}{f':{port}' if port else ''}{f'/{dbname}' if dbname else ''}"

    @property
    def connect_timeout_s(self) -> float:
        return self.connect_timeout

    @property
    def partition(self) -> dict[str, str]:
        return {"slot": self.slot}

    def _connection_options(self) -> dict[str, str]:
        options: dict[str, str] = {}
        given = self.model_fields_set
        if self.dsn is not None:
            found = parse_dsn(resolved(self.dsn) if isinstance(self.dsn, Secret) else self.dsn)
            if found is None:
                raise TailraceError(
                    Kind.CONFIG_INVALID,
                    f"resolve source.dsn: {self.dsn} does not refer to a connection string",
                    "write postgresql://user@host:port/dbname",
                )
            options = {name: resolved(value) for name, value in found.items() if name not in OWN_OPTIONS}
        for name, value in self.given_options.items():
            if name in given or name not in options:
                options[name] = resolved(value) if isinstance(value, Secret) else str(value)
        return options


class NamedSource(PostgresSource):
    """One of several sources."""

    name: SourceName = Field(
        description="Unique name of the source: its folder in the log and in each sink, and the end of its "
        "slot's name; keep it."
    )


def postgres_source(section: SourceSection) -> PostgresSource:
    """Return `section`, which must be a `PostgresSource`."""
    assert isinstance(section, PostgresSource)
    return section


def _sslmode(options: dict[str, str]) -> str:
    given = options.get("sslmode")
    if given is None:
        return "prefer" if _is_local(options) else "verify-full"
    if given in ("allow", "prefer") and not _is_local(options):
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"connect with sslmode {given}: it falls back to plain text if the server or "
            "an attacker in between says that there is no TLS",
            "set sslmode: verify-full in source (or require; or disable, if plain text is intended)",
        )
    return given


def _is_local(options: dict[str, str]) -> bool:
    given = options.get("hostaddr") or options.get("host")
    if not given and ("service" in options or "PGSERVICE" in os.environ):
        return False  # the service file may name any host
    # An address in the environment counts even if a host is given.
    address = "" if options.get("hostaddr") else os.environ.get("PGHOSTADDR", "")
    hosts = f"{given or os.environ.get('PGHOST', '')},{address}"
    named = (host for each in hosts.split(",") if (host := each.strip()))
    return all(host[0] in "/@" or is_loopback(host) for host in named)
