"""What is known of a change beside its row, by Debezium's names and our own, as columns.

`ts_ms` and its like are the commit's time: no clock is read, so that the same change gives the same.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.records.group import Group
from tailrace.transforms.groups.rows import GroupRows, root_column

#: Names that differ from those in `source`.
_CALLED = {"txId": "xid"}


def metadata_column(group: Group, name: str) -> pa.Array:
    """Return a column of `config.transformations.METADATA`; `source.` before it changes nothing.

    Null where it is not known of these records.
    """
    name = name.removeprefix("source.")
    count, rows = len(group), GroupRows(group, "null")
    if name in ("op", "topic"):
        return root_column(group, name)
    if name in ("unchanged", "special"):
        return group.column(name)
    if name in ("ts_ms", "ts_us", "ts_ns", "commit_time"):
        return _time(rows.column(("source", "commit_ts")), name)
    if name in ("name", "db", "version"):
        origin = group.origin
        known = (
            {} if origin is None else {"name": origin.name, "db": origin.database, "version": origin.version}
        )
        return pa.repeat(pa.scalar(known.get(name), pa.string()), count)
    if name == "connector":
        return pa.repeat(pa.scalar("postgresql" if group.origin is None else group.origin.connector), count)
    if name == "xmin":
        return pa.nulls(count, pa.int64())
    if name == "snapshot":
        flags = pc.equal(root_column(group, "op").cast(pa.string()), "r")
        return pc.if_else(flags, "true", "false")
    if name == "sequence":
        return _sequence(rows)
    return rows.column(("source", _CALLED.get(name, name)))


def _time(times: pa.Array, name: str) -> pa.Array:
    if name == "commit_time" or not pa.types.is_timestamp(times.type):
        return times
    us = times.cast(pa.timestamp("us", tz=times.type.tz), safe=False).cast(pa.int64())
    if name == "ts_us":
        return us
    if name == "ts_ns":
        return pc.multiply(us, 1000)
    # Down, not towards zero, as the JSON converter does: times before 1970 are negative.
    thousandths = pc.floor(pc.divide(us.cast(pa.float64(), safe=False), 1000.0))
    return thousandths.cast(pa.int64())


def _sequence(rows: GroupRows) -> pa.Array:
    commit, own = (rows.column(("source", name)).cast(pa.string()) for name in ("commit_lsn", "lsn"))
    return pc.binary_join_element_wise('["', commit, '","', own, '"]', "")
