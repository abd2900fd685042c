"""Converting a group in parts, so that what is made at once is bounded, not only what was read.

A record of a table with many columns, as JSON with schemas, takes hundreds of times the bytes that the log
has of it: each record repeats the names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa

from tailrace.records.events import Converted
from tailrace.records.group import Group

#: About so many bytes of keys and values are made at once.
CONVERTED_BYTES = 16 << 20

#: For the first part, before anything is known: what a column takes in a record, schema included.
_COLUMN_BYTES = 512
#: The next part has at most so many times the records of the one before: records differ.
_GROWTH = 8


def converted_in_parts(
    convert: Callable[[Group], Converted], group: Group, bytes_max: int = CONVERTED_BYTES
) -> Iterator[tuple[Group, Converted]]:
    """Yield the parts of a group, in order, each with what it is converted to.

    :param bytes_max: a part is larger only if its records are much larger than those before it, or if it is
        one record.
    """
    at, records = 0, max(1, bytes_max // (_COLUMN_BYTES * _width(group)))
    while at < len(group):
        upto = min(at + records, len(group))
        part = group if upto - at == len(group) else group.slice(at, upto)
        converted = convert(part)
        yield part, converted
        fitting = bytes_max * len(part) // max(1, bytes_of(converted))
        at, records = upto, max(1, min(fitting, _GROWTH * records))


def bytes_of(converted: Converted) -> int:
    """Return about how many bytes keys and values take; objects other than bytes and text count none."""
    found = 0
    for made in (converted.keys, converted.values):
        if isinstance(made, pa.Array):
            found += made.nbytes
        elif made is not None:
            found += sum(len(one) for one in made if isinstance(one, str | bytes))
    return found


def _width(group: Group) -> int:
    if group.wire is not None:
        return max(1, len(group.relation.columns)) if group.relation is not None else 1
    return max(1, *(int(column.type.num_fields) for column in group.columns.schema))
