"""A mirror's rows are told apart by one key, or the mirror stops.

The database sees to it that a key of its own is a key of all rows, also where it is changed. Of a
key that `source.message_keys` gives, nobody does: rows that were kept apart by another key may be
one row by this one. So the target remembers, from a table's first row on, what its key is made of
and who chose it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tailrace.errors import Kind, TailraceError
from tailrace.model import Relation
from tailrace.sinks.target import Target

if TYPE_CHECKING:
    from tailrace.sinks.delta_sink import TableWork

_FILE = "keys.json"


def require_same_keys(target: Target, work: Iterable[TableWork]) -> None:
    """Check that no table's key became another by the configuration, and remember each.

    Before anything of `work` is committed.

    :raises TailraceError: `SINK_SCHEMA_REFUSED`, `SINK_WRITE_FAILED`.
    """
    known = target.read(_FILE) or {}
    found = dict(known)
    for each in work:
        relation = each.files[-1].relation
        now, before = _mark(relation), known.get(str(relation.oid))
        chosen = now["chosen"] or (before is not None and before["chosen"])
        if before is not None and before["key"] != now["key"] and chosen and each.folder.exists():
            raise TailraceError(
                Kind.SINK_SCHEMA_REFUSED,
                f"mirror a table: its key is ({', '.join(relation.key)}), and the mirror's rows were told "
                f"apart by ({', '.join(before['names'])}); source.message_keys was changed",
                "restore the table's key in source.message_keys; or give the sink a new, empty path, so that "
                "it reads the log from its start",
                {"sink": target.sink, "table": relation.qualified_name},
            )
        found[str(relation.oid)] = now
    if found != known:
        target.write(_FILE, found)


def _mark(relation: Relation) -> dict[str, Any]:
    # By their numbers, since names change; the names are for the message.
    numbers = {column.name: column.number for column in relation.columns}
    return {
        "key": [numbers[name] or name for name in relation.key],
        "names": list(relation.key),
        "chosen": bool(relation.chosen_key),
    }
