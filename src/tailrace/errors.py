"""The errors of all packages: one class with many kinds, and the policy for each kind.

A kind is a stable name for scripts and `status --json`; the message says what was attempted
and what was found; the hint says what to do. No message, hint or context contains values of
rows or a secret: they name tables, positions and files.

`POLICY` decides which kinds are retried. An error of any other kind stops the component that
raised it.
"""

from __future__ import annotations

import enum
import errno
import re
from collections.abc import Mapping
from typing import Any


class Kind(enum.StrEnum):
    """Stable names of failures, grouped by where they arise."""

    # configuration and command line
    CONFIG_INVALID = "config_invalid"
    SECRET_MISSING = "secret_missing"
    ENVIRONMENT_UNFIT = "environment_unfit"  # Java missing or too old, package missing

    # source
    SOURCE_UNREACHABLE = "source_unreachable"
    SOURCE_SHUTTING_DOWN = "source_shutting_down"
    SOURCE_AUTH_FAILED = "source_auth_failed"
    SOURCE_PRIVILEGE_MISSING = "source_privilege_missing"
    SOURCE_MISCONFIGURED = "source_misconfigured"  # wal_level, senders, slots
    SOURCE_CHANGED = "source_changed"  # another system identifier or database
    SOURCE_BEHIND_LOG = "source_behind_log"  # restored backup, failover that lost commits
    SOURCE_TIMELINE_CHANGED = "source_timeline_changed"
    SOURCE_QUERY_FAILED = "source_query_failed"
    SLOT_IN_USE = "slot_in_use"
    SLOT_MISSING = "slot_missing"
    SLOT_FOREIGN = "slot_foreign"  # exists, but was not created for this log
    SLOT_INVALIDATED = "slot_invalidated"
    SLOT_CREATION_HELD_UP = "slot_creation_held_up"  # by older open transactions
    SLOT_AHEAD_OF_LOG = "slot_ahead_of_log"
    SLOT_AT_RISK = "slot_at_risk"  # a warning: it may be lost, or fills the disk
    TRANSACTION_OPEN = "transaction_open"  # a warning: it holds back WAL, or a new slot waits for it
    PUBLICATION_MISSING = "publication_missing"
    PUBLICATION_MISMATCH = "publication_mismatch"
    TABLE_MISSING = "table_missing"
    COLUMN_NOT_SENT = "column_not_sent"  # the stream lacks a column that the table has
    SHARDS_LOST = "shards_lost"  # their changes are not captured until their keys are copied again
    SNAPSHOT_FAILED = "snapshot_failed"
    SNAPSHOT_DELAYED = "snapshot_delayed"  # the stream is too far behind, or DDL interfered

    # wire
    PROTOCOL_VIOLATION = "protocol_violation"
    FRAME_TOO_LARGE = "frame_too_large"

    # change log
    LOG_LOCKED = "log_locked"
    LOG_FENCED = "log_fenced"  # a later writer took over
    LOG_FOREIGN = "log_foreign"  # the log of another source
    LOG_MISSING = "log_missing"
    LOG_CORRUPT = "log_corrupt"
    LOG_FORMAT_UNKNOWN = "log_format_unknown"
    LOG_FULL = "log_full"  # no space left
    LOG_WRITE_FAILED = "log_write_failed"  # includes a failed fsync: final
    LOG_RANGE_GONE = "log_range_gone"  # retention removed it
    LOG_RANGE_INVALID = "log_range_invalid"

    # decoding
    DECODE_FAILED = "decode_failed"
    SCHEMA_MISSING = "schema_missing"
    SCHEMA_CHANGED = "schema_changed"
    SCHEMA_PENDING = "schema_pending"  # the catalogue facts of an altered table are not known yet
    TABLE_UNKNOWN = "table_unknown"

    # joining topics
    JOIN_VIOLATED = "join_violated"  # the topics break an assumption: order, repetition, missing transaction

    # converting
    CONVERSION_FAILED = "conversion_failed"  # a record has a value that its output format can't represent
    SCHEMA_REFUSED = "schema_refused"  # by a schema registry: incompatible, invalid or not registered
    REGISTRY_UNREACHABLE = "registry_unreachable"
    REGISTRY_REFUSED = "registry_refused"  # credentials, privileges

    # sinks
    SINK_LOCKED = "sink_locked"  # another engine writes to it
    SINK_FOREIGN = "sink_foreign"  # the target has another pipeline's or log's data
    SINK_DAMAGED = "sink_damaged"  # the sink's record of its commits and its content differ
    SINK_AHEAD_OF_LOG = "sink_ahead_of_log"
    SINK_SCHEMA_REFUSED = "sink_schema_refused"
    SINK_KEY_MISSING = "sink_key_missing"
    SINK_WRITE_FAILED = "sink_write_failed"
    SINK_MISCONFIGURED = "sink_misconfigured"  # a topic that is missing or is not compacted
    SINK_PREEMPTED = "sink_preempted"  # another producer with its transactional id has started
    SINK_TRANSACTION_TOO_LONG = "sink_transaction_too_long"  # a source's transaction exceeds Kafka's limits
    SINK_RECORD_TOO_LARGE = "sink_record_too_large"
    SINK_REFUSED = "sink_refused"  # credentials, privileges
    SPARK_FAILED = "spark_failed"

    # engine
    TASK_FAILED = "task_failed"  # a task, handler or transformation raised another error than TailraceError
    TASK_TIMED_OUT = "task_timed_out"  # it did not start or stop in time
    TRANSFORM_FAILED = "transform_failed"  # records don't fit a transformation's options
    ENGINE_MISUSED = "engine_misused"  # a call that the engine's state does not allow
    RECORD_INVALID = "record_invalid"  # a task made a record with a value that no column can store
    OFFSETS_UNREADABLE = "offsets_unreadable"
    OFFSETS_UNWRITABLE = "offsets_unwritable"
    OFFSETS_LOCKED = "offsets_locked"  # another process uses the store
    OFFSETS_PREEMPTED = "offsets_preempted"  # another engine of the same name has started
    OFFSETS_FOREIGN = "offsets_foreign"  # of another log, or beyond this one's end

    # subscriptions
    SUBSCRIPTION_UNAUTHORIZED = "subscription_unauthorized"  # no token, or a wrong one
    SUBSCRIPTION_FORBIDDEN = "subscription_forbidden"  # for pages of that origin
    SUBSCRIBERS_EXCEEDED = "subscribers_exceeded"  # the largest number of subscribers is reached

    # anything else, always a bug in Tailrace
    INTERNAL = "internal"


#: Hint of `INTERNAL`.
REPORT = "this is a bug: please report it, with `tailrace --version` and the trace that --debug shows"
#: Hint of `PROTOCOL_VIOLATION` while reading from a server: the next start reads the same data again.
REPORT_STREAM = (
    "nothing of it was stored or acknowledged: start again; if it happens again, please report it with the "
    "server's version"
)
#: Hint of `PROTOCOL_VIOLATION` while reading the log.
REPORT_LOG = "run `tailrace log verify`; if the log is whole, please report it with the server's version"


#: Numbers of the operating system's errors for too many open files, and what to do.
TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
RAISE_LIMIT = "raise the limit of open files (`ulimit -n`)"


#: Start of a command that needs to know which source is meant.
_FILE = re.compile(r"tailrace (snapshot|replay|offsets (set|reset)) FILE")


class Policy(enum.Enum):
    """The engine's reaction to a failure."""

    STOP = "stop"  # the user must act
    RETRY = "retry"  # with back-off, up to the configured limit


POLICY: dict[Kind, Policy] = {
    Kind.SOURCE_UNREACHABLE: Policy.RETRY,
    Kind.SOURCE_SHUTTING_DOWN: Policy.RETRY,
    Kind.SLOT_IN_USE: Policy.RETRY,
    Kind.SLOT_CREATION_HELD_UP: Policy.RETRY,
    Kind.SNAPSHOT_DELAYED: Policy.RETRY,
    Kind.LOG_FULL: Policy.RETRY,
    Kind.SCHEMA_PENDING: Policy.RETRY,
    Kind.REGISTRY_UNREACHABLE: Policy.RETRY,
    Kind.SINK_WRITE_FAILED: Policy.RETRY,
    Kind.SPARK_FAILED: Policy.RETRY,
    Kind.OFFSETS_UNWRITABLE: Policy.RETRY,
}


#: Kinds after which the log lacks changes: capture can only continue with a new log and a new snapshot.
NEEDS_SNAPSHOT: frozenset[Kind] = frozenset(
    {
        Kind.SLOT_INVALIDATED,
        Kind.SLOT_MISSING,
        Kind.SLOT_AHEAD_OF_LOG,
        Kind.PUBLICATION_MISSING,
        Kind.COLUMN_NOT_SENT,
    }
)


class TailraceError(Exception):
    """A failure, with its kind, a message, a hint and its context.

    :param kind: the stable name.
    :param message: what was attempted and what was found.
    :param hint: what the user can do about it; may be empty.
    :param context: names of the table, position or file concerned, never contents.

    Everything is in `args`, so that the error survives pickling between Spark's processes.
    """

    def __init__(
        self, kind: Kind, message: str, hint: str = "", context: dict[str, Any] | None = None
    ) -> None:
        super().__init__(kind, message, hint, context or {})

    @property
    def kind(self) -> Kind:
        return Kind(self.args[0])

    @property
    def message(self) -> str:
        return str(self.args[1])

    @property
    def hint(self) -> str:
        return str(self.args[2])

    @property
    def context(self) -> dict[str, Any]:
        return dict(self.args[3])

    @property
    def policy(self) -> Policy:
        return POLICY.get(self.kind, Policy.STOP)

    def changed(
        self,
        context: Mapping[str, Any] | None = None,
        *,
        kind: Kind | None = None,
        message: str | None = None,
        hint: str | None = None,
    ) -> TailraceError:
        """Return the error with other parts; `context` is added to its own."""
        message = self.message if message is None else message
        hint = self.hint if hint is None else hint
        return TailraceError(kind or self.kind, message, hint, {**self.context, **(context or {})})

    def of_source(self, name: str) -> TailraceError:
        """Return the error of one of several sources: commands in its hint select it.

        :param name: of the source; empty: it is the only one.
        """
        return self.changed(hint=_FILE.sub(rf"\g<0> --source {name}", self.hint)) if name else self

    def __str__(self) -> str:
        where = ", ".join(f"{name}={value}" for name, value in self.context.items())
        text = f"{self.kind}: {self.message}"
        if where:
            text += f" ({where})"
        if self.hint:
            text += f"\n  hint: {self.hint}"
        return text

    def as_json(self) -> dict[str, Any]:
        """Return the error as `status --json` shows it."""
        return {
            "kind": str(self.kind),
            "message": self.message,
            "hint": self.hint,
            "context": self.context,
        }


def error_json(error: TailraceError | None) -> dict[str, Any] | None:
    """Return an error as `status --json` shows it; None if there is none."""
    return None if error is None else error.as_json()


def printable(text: str) -> str:
    """Return `text` with control characters escaped: a name from outside must not control a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class StopEngine(Exception):  # noqa: N818 - a request, not an error
    """Stops the engine in order. If a handler raises it, the record or batch counts as processed.

    If a transformation, a predicate or a converter raises it, no record of the batch counts as processed:
    the batch was not passed to the handler, and is delivered after the next start.
    """


class RetriableError(Exception):
    """A transient failure: the operation is retried after a wait.

    Raised by a task's `poll` or `start`, or by a handler, a transformation, a predicate or a converter,
    which is called again with the same batch or record. A `TailraceError` whose kind has
    `Policy.RETRY` has the same effect.
    """


class Stopped(Exception):  # noqa: N818 - not an error: the caller asked to stop
    """Raised by a wait when a stop was requested."""
