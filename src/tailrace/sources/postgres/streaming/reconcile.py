"""Decides at every start whether source and log still match, and how to continue. Pure.

From the facts of both it returns the action to begin with, or raises an error that names the
mismatch and what the user can do. It never moves a position to "latest", recreates a slot that
the log depends on, or empties anything that was once complete.

The log has precedence over the state file: an unfinished snapshot is cut off when the log is
opened, so a position above 0 proves that one was finished.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Literal

from tailrace.errors import Kind, TailraceError
from tailrace.model import SourceFingerprint, format_lsn
from tailrace.sources.postgres.connection.quoting import quote_literal
from tailrace.sources.postgres.slot.invalidation import explained, prevention

SnapshotMode = Literal["initial", "when_needed", "never", "only"]

#: Errors after which `when_needed` continues; not those of a source that lost transactions itself.
RENEWABLE = frozenset({Kind.SLOT_MISSING, Kind.SLOT_INVALIDATED, Kind.SLOT_AHEAD_OF_LOG})


class CapturePhase(enum.StrEnum):
    """Phase of a task, as stored in its state file."""

    BEGINNING = "beginning"  # the slot may or may not exist; a snapshot may be under way
    STREAMING = "streaming"
    RENEWING = "renewing"  # as streaming, but a renewal may have created the slot without checking it
    FINISHED = "finished"  # `snapshot: only` is done


@dataclass(frozen=True, slots=True)
class CaptureState:
    """The state that a task stores with its log, durably, before it does what the state announces.

    `own_publication`: the publication did not exist when the beginning was announced, so if it exists when
    the task begins again, that beginning created it.
    `behind_at`: the end of the server's WAL when it was last found to be before the log's end; 0: it was not.
    `standby`: the captured server was a standby.
    """

    phase: CapturePhase
    system_identifier: str
    timeline: int
    announced_lsn: int  # the server's WAL end before the slot was created
    consistent_point: int  # of the slot; 0: unknown
    own_publication: bool = False
    behind_at: int = 0
    standby: bool = False

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> CaptureState:
        return cls(
            CapturePhase(content["phase"]),
            str(content["system_identifier"]),
            int(content["timeline"]),
            int(content["announced_lsn"]),
            int(content["consistent_point"]),
            bool(content.get("own_publication", False)),
            int(content.get("behind_at", 0)),
            bool(content.get("standby", False)),
        )


@dataclass(frozen=True, slots=True)
class SlotFacts:
    """A row of `pg_replication_slots`, the same for all versions of the server.

    `invalidation` is empty for a valid slot, else a key of `invalidation.REASONS`. LSNs are None
    if the server has NULL. `failover` and `synced` (from a primary) exist since version 17.
    """

    plugin: str
    database: str
    temporary: bool
    active_pid: int | None
    restart_lsn: int | None
    confirmed_flush_lsn: int | None
    invalidation: str = ""
    failover: bool = False
    synced: bool = False


@dataclass(frozen=True, slots=True)
class ServerState:
    """The present state of the server.

    `left_stored_timeline_at`: the LSN at which the server's history left the log's last timeline;
    None if the server is still on it, or if its history does not contain that timeline.
    """

    system_identifier: str
    database: str
    timeline: int
    flush_lsn: int
    slot: SlotFacts | None
    left_stored_timeline_at: int | None = None
    standby: bool = False


@dataclass(frozen=True, slots=True)
class LogFacts:
    """The present state of the log; `position` is 0 while the log has no complete unit."""

    source: SourceFingerprint
    position: int
    state: CaptureState | None


class Action(enum.Enum):
    """What a task does first."""

    FRESH = "fresh"  # create the slot, then take the snapshot
    RESTART = "restart"  # the same, after dropping the task's own slot of an unfinished beginning
    RESUME = "resume"  # stream from the log's position
    RENEW = "renew"  # changes were lost: read all tables again, and stream from the slot's position
    FINISHED = "finished"  # nothing remains to be done


@dataclass(frozen=True, slots=True)
class Start:
    """The decision. `position` is where streaming starts, 0 if not known yet; `lost` is the error by which
    changes were lost.
    """

    action: Action
    position: int = 0
    lost: TailraceError | None = None


_NEW_LOG = (
    "to continue, begin a new log with a new snapshot: set log.path to a new directory{drop}; "
    "the old log stays readable"
)

#: Hint for another slot; a log, even if still empty, keeps the name of its slot.
_OTHER_SLOT = "name another one in source.slot, and a new directory in log.path"


def decide(source: ServerState, log: LogFacts, mode: SnapshotMode) -> Start:
    """Return how the task begins.

    :raises TailraceError: `SOURCE_CHANGED`, `SOURCE_TIMELINE_CHANGED`, `SOURCE_BEHIND_LOG`,
        `SLOT_MISSING`, `SLOT_FOREIGN`, `SLOT_INVALIDATED`, `SLOT_AHEAD_OF_LOG`, which are permanent;
        `SLOT_IN_USE` and, for a standby that has not replayed what the log has, `SOURCE_UNREACHABLE`, which
        are transient.
    """
    _check_same_source(source, log)
    begun = log.position > 0 or (log.state is not None and log.state.phase is not CapturePhase.BEGINNING)
    if not begun:
        return _begin(source, log)
    _check_history(source, log)
    if mode == "only":
        return Start(Action.FINISHED, log.position)
    try:
        _check_slot(source, log)
    except TailraceError as error:
        if mode != "when_needed" or error.kind not in RENEWABLE:
            raise
        if source.slot is not None:
            _check_free(source.slot, log)
        return Start(Action.RENEW, log.position, error)
    return Start(Action.RESUME, log.position)


def _check_slot(source: ServerState, log: LogFacts) -> None:
    if source.slot is None and source.standby and log.state is not None and not log.state.standby:
        raise TailraceError(
            Kind.SOURCE_UNREACHABLE,
            f"use the slot {log.source.slot!r}: the server is a standby without it; the log is a primary's",
            "it is tried again, as while an address moves to another server. If the primary runs: connect to "
            "it. To capture from this standby: set log.path, and path of each sink, to new directories",
            {"slot": log.source.slot},
        )
    if source.slot is None:
        raise slot_missing(f"resume at {format_lsn(log.position)}", log.source.slot)
    _check_own(source.slot, source, log)  # first: a slot that is not synchronised yet is temporary
    _check_kind(source.slot, source, log)
    _check_sound(source.slot, log)
    _check_position(source.slot, log)
    _check_free(source.slot, log)


def slot_missing(attempted: str, slot: str) -> TailraceError:
    """Return the error for a log whose slot does not exist."""
    return TailraceError(
        Kind.SLOT_MISSING,
        f"{attempted}: the slot {slot!r} does not exist",
        "it was dropped, or a failover switched to a server without it: changes since then are lost; "
        + _NEW_LOG.format(drop=""),
        {"slot": slot},
    )


def _check_same_source(source: ServerState, log: LogFacts) -> None:
    for what, found, kept, why in (
        (
            "system identifier",
            source.system_identifier,
            log.source.system_identifier,
            " (also for the same databases after pg_upgrade, or restored from a dump)",
        ),
        ("database", source.database, log.source.database, ""),
    ):
        if found != kept:
            raise TailraceError(
                Kind.SOURCE_CHANGED,
                f"compare source and log: the log was made from {what} {kept}, the source has {found}",
                f"connect to the source that the log belongs to, or set log.path to a new directory{why}",
                {"slot": log.source.slot},
            )


def _check_history(source: ServerState, log: LogFacts) -> None:
    at = format_lsn(log.position)
    known = log.state.timeline if log.state is not None else source.timeline
    left_at = source.left_stored_timeline_at
    if source.timeline != known and (source.timeline < known or left_at is None):
        raise TailraceError(
            Kind.SOURCE_TIMELINE_CHANGED,
            f"compare source and log: the log ends at {at} on timeline {known}, "
            f"the server is on timeline {source.timeline}, whose history does not contain it",
            "it looks like a restored backup or another branch of the cluster: connect to the server that "
            "has timeline " + f"{known}, or " + _NEW_LOG.format(drop=" and drop the slot"),
            {"slot": log.source.slot},
        )
    if source.timeline != known and left_at is not None and log.position > left_at:
        raise TailraceError(
            Kind.SOURCE_TIMELINE_CHANGED,
            f"compare source and log: the log ends at {at} on timeline {known}, which the server left "
            f"already at {format_lsn(left_at)}",
            "the failover lost transactions that the log has: compare the tables changed since then; "
            + _NEW_LOG.format(drop=" and drop the slot"),
            {"slot": log.source.slot},
        )
    behind_at = _behind_at(source, log)
    if behind_at and source.standby:
        raise TailraceError(
            Kind.SOURCE_UNREACHABLE,
            f"compare source and log: the log ends at {at}, the standby has replayed WAL up to "
            f"{format_lsn(behind_at)} only, as after its restart",
            "it is tried again. If the standby was restored from a backup, restore a later state of it; or "
            + _NEW_LOG.format(drop=" and drop the slot"),
            {"slot": log.source.slot},
        )
    if behind_at:
        raise TailraceError(
            Kind.SOURCE_BEHIND_LOG,
            f"compare source and log: the log ends at {at}, the server's WAL at {format_lsn(behind_at)}"
            + ("" if behind_at == source.flush_lsn else " at an earlier start, and now after the log's end"),
            "the server lost transactions that the log has (a restored backup, a failover): restore a later "
            "state of it; or " + _NEW_LOG.format(drop=" and drop the slot"),
            {"slot": log.source.slot},
        )


def _behind_at(source: ServerState, log: LogFacts) -> int:
    """Return the end of the server's WAL, now or at an earlier start, if it was before the log's end; or 0.

    The WAL of a server that lost transactions reaches the log's end again, with others. It is the right
    server, or one restored to a later state, only if its slot was advanced beyond the end found then.
    """
    if log.position > source.flush_lsn:
        return source.flush_lsn
    before = log.state.behind_at if log.state is not None else 0
    flushed = source.slot.confirmed_flush_lsn if source.slot is not None else None
    return before if before and flushed is not None and flushed <= before else 0


def _begin(source: ServerState, log: LogFacts) -> Start:
    slot, state = source.slot, log.state
    if slot is None:
        return Start(Action.FRESH)
    drop = f"SELECT pg_drop_replication_slot({quote_literal(log.source.slot)})"
    if state is None:
        raise TailraceError(
            Kind.SLOT_FOREIGN,
            f"begin a new log: the slot {log.source.slot!r} exists, but was not created for this log",
            f"drop it with {drop}; or {_OTHER_SLOT}",
            {"slot": log.source.slot},
        )
    _check_kind(slot, source, log)
    flushed = slot.confirmed_flush_lsn
    ours = flushed is None or (
        flushed == state.consistent_point if state.consistent_point else flushed >= state.announced_lsn
    )
    if not ours:
        raise TailraceError(
            Kind.SLOT_FOREIGN,
            f"begin again after an interrupted start: the slot {log.source.slot!r} is not the one that was "
            "created then, or another client has read from it",
            f"drop it with {drop}; or {_OTHER_SLOT}",
            {"slot": log.source.slot},
        )
    _check_free(slot, log)
    return Start(Action.RESTART)


def _check_kind(slot: SlotFacts, source: ServerState, log: LogFacts) -> None:
    strange = ""
    if slot.plugin != "pgoutput":
        strange = f"has the plugin {slot.plugin!r}, not pgoutput"
    elif slot.database != source.database:
        strange = f"belongs to the database {slot.database!r}"
    elif slot.temporary:
        strange = "is temporary"
    if strange:
        raise TailraceError(
            Kind.SLOT_FOREIGN,
            f"use the slot {log.source.slot!r}: it {strange}",
            _OTHER_SLOT,
            {"slot": log.source.slot},
        )


def _check_own(slot: SlotFacts, source: ServerState, log: LogFacts) -> None:
    if slot.synced and source.standby:
        raise TailraceError(
            Kind.SOURCE_UNREACHABLE,
            f"use the slot {log.source.slot!r}: the server is a standby, which follows its primary's slot",
            "it is tried again until this server is promoted. If its primary runs: connect to the primary",
            {"slot": log.source.slot},
        )


def _check_sound(slot: SlotFacts, log: LogFacts) -> None:
    if slot.invalidation:
        raise TailraceError(
            Kind.SLOT_INVALIDATED,
            f"resume at {format_lsn(log.position)}: the server has invalidated the slot "
            f"{log.source.slot!r} ({explained(slot.invalidation)})",
            "changes are lost to this log; "
            + _NEW_LOG.format(drop=" and drop the slot")
            + f". To prevent it in future: {prevention(slot.invalidation)}",
            {"slot": log.source.slot},
        )


def _check_position(slot: SlotFacts, log: LogFacts) -> None:
    flushed = slot.confirmed_flush_lsn
    if flushed is None or flushed > log.position or (slot.restart_lsn or 0) > log.position:
        found = "has no position yet" if flushed is None else f"is already at {format_lsn(flushed)}"
        raise TailraceError(
            Kind.SLOT_AHEAD_OF_LOG,
            f"resume at {format_lsn(log.position)}: the slot {log.source.slot!r} {found}",
            "it was created again, read by another client, or the log is an old copy: the changes between "
            "are lost to this log; " + _NEW_LOG.format(drop=" and drop the slot"),
            {"slot": log.source.slot},
        )


def _check_free(slot: SlotFacts, log: LogFacts) -> None:
    if slot.active_pid is not None:
        raise TailraceError(
            Kind.SLOT_IN_USE,
            f"use the slot {log.source.slot!r}: it is active for the server process {slot.active_pid}",
            "another pipeline uses it, or an old connection has not timed out yet; if nothing needs it: "
            f"SELECT pg_terminate_backend({slot.active_pid});",
            {"slot": log.source.slot, "pid": slot.active_pid},
        )
