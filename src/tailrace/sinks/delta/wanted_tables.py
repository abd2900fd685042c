"""Tables and columns that a mirror's settings left out for a while: their rows must be read again.

The `tables` of a sink and the columns of a source may be changed between runs. Changes that were left out are
before the mirror's position, and are not delivered later. Without them the mirror would lack rows, or have
rows, or NULL in a column, that the source never had. So the target stores the patterns with which it was last
written, and each relation, by its oid, that is no longer left out or has such a column, with the log offset
of that change: all of its rows must be read again at that offset or later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tailrace.config.source.column_policy import ColumnPolicy, ColumnRoles
from tailrace.protocol.facts import Facts
from tailrace.protocol.renames import Renames
from tailrace.sinks.delta.table_identity import Displaced
from tailrace.sinks.target import Target
from tailrace.sinks.write_job import SinkInput


def returned(
    target: Target,
    file: str,
    given: SinkInput,
    have: int,
    known: Callable[[], tuple[Iterable[Facts], Renames]],
) -> dict[int, Displaced]:
    """Return the relations, by oid, that must be read again and were not yet. Stores nothing: settings that
    are taken back before anything is written have no effect.

    A target without patterns, from an earlier version, counts as written with the current ones.

    :param have: the log offset up to which the mirror has everything.
    :param known: returns the facts in force at that offset, and other names of columns.
    """
    kept = target.read(file)
    if kept is None:
        return {}
    found = {int(oid): Displaced(*each) for oid, each in kept["awaited"].items()}
    if kept["patterns"] != _patterns(given):
        before = _given(kept["patterns"])
        facts, renames = known()
        latest = {each.relation: each for each in facts}
        found |= {
            oid: Displaced(each.qualified_name, have)
            for oid, each in latest.items()
            if _columns(each, given, renames) - _columns(each, before, renames)
        }
    return found


def note_read_again(target: Target, file: str, given: SinkInput, awaited: Mapping[int, Displaced]) -> None:
    """Store the current patterns, and the relations that must still be read again."""
    content = {
        "patterns": _patterns(given),
        "awaited": {str(oid): [each.before, each.since] for oid, each in awaited.items()},
    }
    if target.read(file) != content:
        target.write(file, content)


def _patterns(given: SinkInput) -> dict[str, Any]:
    rules = given.rules
    return {
        "tables": None if given.tables is None else list(given.tables),
        "columns": list(rules.columns),
        "columns_exclude": list(rules.columns_exclude),
    }


def _given(patterns: dict[str, Any]) -> SinkInput:
    tables = patterns["tables"]
    rules = ColumnPolicy(columns=patterns["columns"], columns_exclude=patterns["columns_exclude"])
    return SinkInput(None if tables is None else tuple(tables), rules)


def _columns(facts: Facts, given: SinkInput, renames: Renames) -> set[str]:
    """Return the columns of a table that a mirror gets with these settings; none if it lacks the table."""
    if not given.wants(facts.schema, facts.table):
        return set()
    names = tuple(column.name for column in facts.columns)
    key = frozenset(facts.primary_key)
    roles = ColumnRoles(names, key, False, key, renames.of(facts.relation, facts.columns))
    return set(names) - given.rules.left_out(facts.schema, facts.table, roles)
