"""A mirror's rows are all masked alike, or the mirror stops.

A mirror keeps rows that no later change touches. Were a mask added, taken away or given another
salt, some rows would show what others hide, and a masked key would no longer find its row. So the
target remembers a mark of each column's mask from the table's first row on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tailrace.decode.disclosed import Disclosed
from tailrace.errors import Kind, TailraceError
from tailrace.sinks.target import Target

if TYPE_CHECKING:
    from tailrace.sinks.delta_sink import TableWork

_FILE = "masks.json"


def require_same_masks(target: Target, disclosed: Disclosed, work: Iterable[TableWork]) -> None:
    """Check that tables are masked as they were, and remember how new ones and new columns are.

    Before anything of `work` is committed.

    :raises TailraceError: `SINK_SCHEMA_REFUSED`, `SINK_WRITE_FAILED`.
    """
    known = target.read(_FILE) or {}
    found = dict(known)
    for each in work:
        relation = each.files[-1].relation
        before, now = known.get(each.folder.path.name, {}), disclosed.mask_marks(relation)
        changed = {
            column.name for column in relation.columns if before.get(column.name) != now.get(column.name)
        }
        if changed and each.folder.exists() and (mixed := changed & set(each.folder.schema().names)):
            raise TailraceError(
                Kind.SINK_SCHEMA_REFUSED,
                f"mirror a table: the mask of {', '.join(map(repr, sorted(mixed)))} is not the one that the "
                "mirror's rows were made under",
                "restore the mask and its salt; or give the sink a new, empty path, so that it reads the log "
                "from its start",
                {"sink": target.sink, "table": relation.qualified_name},
            )
        if changed:
            found[each.folder.path.name] = {**before, **now}
    if found != known:
        target.write(_FILE, found)
