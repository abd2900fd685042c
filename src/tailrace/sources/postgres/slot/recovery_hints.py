"""Which commands lead on after changes were lost to the log: a new log, with a new snapshot.

Nothing is ever wiped: what the old log and the targets hold is moved aside, so that it stays
readable and nobody's data is gone.
"""

from __future__ import annotations

import shlex

from tailrace.config import PipelineConfig
from tailrace.config.source.postgres import postgres_source
from tailrace.errors import NEEDS_SNAPSHOT, Kind, TailraceError
from tailrace.sources.postgres.connection.session import quote_literal
from tailrace.sources.postgres.streaming.reconcile import RENEWABLE

#: What the next start does under `snapshot: when_needed`.
RENEWAL = "snapshot: when_needed has it make the slot anew where that is lost, and read all tables again"

#: What is put behind the name of a directory that is moved aside.
ASIDE = ".before"


def way_out(config: PipelineConfig, *, drop_slot: bool) -> str:
    """Return what to run, in order.

    :param drop_slot: whether the slot still exists.
    """
    places = dict.fromkeys([config.log.path, *(sink.path for sink in config.folders)])
    steps = [f"{shlex.join(['mv', '--', str(place), f'{place}{ASIDE}'])}" for place in places]
    if drop_slot:
        slot = postgres_source(config.source).slot
        steps.insert(
            0,
            f"in the database: SELECT pg_drop_replication_slot({quote_literal(slot)});",
        )
    steps.append("start the pipeline again with tailrace run: it takes a new snapshot")
    return " ".join(f"({number}) {step}" for number, step in enumerate(steps, 1))


def with_way_out(error: TailraceError, config: PipelineConfig) -> TailraceError:
    """Return `error` with the commands that lead on, if only a new snapshot does."""
    if error.kind not in NEEDS_SNAPSHOT:
        return error
    if postgres_source(config.source).snapshot == "when_needed" and error.kind in RENEWABLE:
        hint = f"start the pipeline again with tailrace run: {RENEWAL}"
        return TailraceError(error.kind, error.message, hint, error.context)
    steps = way_out(config, drop_slot=error.kind is not Kind.SLOT_MISSING)
    return TailraceError(error.kind, error.message, f"{error.hint}. Run: {steps}", error.context)
