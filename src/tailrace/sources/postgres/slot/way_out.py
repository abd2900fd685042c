"""Commands that begin a new log with a new snapshot, for errors after which a log can't continue.

Nothing is deleted: the old log and the targets are renamed, so that they stay readable.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from tailrace.config import PipelineConfig
from tailrace.config.kafka import KafkaSinkConfig
from tailrace.config.source.postgres import postgres_source
from tailrace.errors import NEEDS_SNAPSHOT, Kind, TailraceError
from tailrace.sources.postgres.connection.quoting import quote_literal
from tailrace.sources.postgres.streaming.reconcile import RENEWABLE

#: Describes what the next start does under `snapshot: when_needed`.
RENEWAL = "snapshot: when_needed makes a new slot where the old one is lost, and reads all tables again"

#: Kinds after which a new log is a second way to continue, in addition to their own hints.
_NEW_LOG_HELPS = frozenset(
    {Kind.SOURCE_CHANGED, Kind.SOURCE_TIMELINE_CHANGED, Kind.SOURCE_BEHIND_LOG, Kind.LOG_CORRUPT}
)
#: Kinds after which the source has no slot of this log; one of its name may be another pipeline's.
_WITHOUT_SLOT = frozenset({Kind.SLOT_MISSING, Kind.SOURCE_CHANGED})

#: Suffix of the new name of a directory; a number follows if there is one of that name.
ASIDE = ".before"


def way_out(config: PipelineConfig, *, drop_slot: bool) -> str:
    """Return the commands that begin a new log, numbered, in order.

    :param drop_slot: whether the slot may still exist.
    """
    places = dict.fromkeys([config.log.path, *(sink.path for sink in config.folders)])
    steps = [shlex.join(["mv", "--", str(place), _aside(place)]) for place in places]
    if drop_slot:
        slot = postgres_source(config.source).slot
        steps.insert(
            0,
            # Selects nothing if the slot does not exist: it may have been lost with the server.
            f"in the database: SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE "  # noqa: S608
            f"slot_name = {quote_literal(slot)};",
        )
    among = ["--source", config.source_name] if config.source_name else []
    steps += [
        shlex.join(["tailrace", "offsets", "reset", "FILE", *among, "--sink", sink.name, "--yes"])
        for sink in config.sinks
        if isinstance(sink, KafkaSinkConfig)
    ]
    steps.append("start the pipeline again with tailrace run: it takes a new snapshot")
    return " ".join(f"({number}) {step}" for number, step in enumerate(steps, 1))


def _aside(place: Path) -> str:
    # Into an existing directory, `mv` would move the other one, or fail.
    names = (f"{place}{ASIDE}{number}" for number in ("", *range(2, 1000)))
    return next(name for name in names if not os.path.lexists(name))


def with_way_out(error: TailraceError, config: PipelineConfig) -> TailraceError:
    """Return `error`, with the commands that begin a new log if these help."""
    if error.kind not in NEEDS_SNAPSHOT | _NEW_LOG_HELPS:
        return error
    if postgres_source(config.source).snapshot == "when_needed" and error.kind in RENEWABLE:
        return error.changed(hint=f"start the pipeline again with tailrace run: {RENEWAL}")
    steps = way_out(config, drop_slot=error.kind not in _WITHOUT_SLOT)
    run = "Run" if error.kind in NEEDS_SNAPSHOT else "For a new log, run"
    return error.changed(hint=f"{error.hint}. {run}: {steps}")
