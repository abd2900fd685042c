"""The columns of a group's records over which expressions are computed.

Paths begin with `op`, `topic`, `key`, `before`, `after`, `value`, `source` or `headers`. Of a group that is
not decoded yet, only the requested columns are made: `op` and `source` need no decoding. Metadata of a change
are columns as well, with Debezium's names and our own: `ts_ms` and the like are the time of the commit. No
clock is read, so that the same change always gives the same values.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.decode.gather import string_array
from tailrace.decode.images import shards_of
from tailrace.decode.json.shard_texts import vgtids
from tailrace.decode.values.texts import texts_of
from tailrace.errors import Kind, TailraceError
from tailrace.expressions.computing import Expression, NoColumnError
from tailrace.expressions.language import ExpressionError
from tailrace.records.group import Flags, Group
from tailrace.transforms.groups.values import column_texts


class GroupRows:
    """The rows of a group, as columns by path.

    :param missing: `null`: a column that does not exist has only NULLs; `error`: it raises `NoColumnError`.
    """

    def __init__(self, group: Group, missing: str = "error") -> None:
        self._group = group
        self._missing = missing
        self._known: dict[tuple[str, ...], pa.Array] = {}

    def __len__(self) -> int:
        return len(self._group)

    def column(self, parts: tuple[str, ...]) -> pa.Array:
        """Return the column at a path.

        :raises NoColumnError: if there is none, unless `missing` is `null`.
        """
        if parts not in self._known:
            try:
                self._known[parts] = self._column(parts)
            except NoColumnError:
                if self._missing != "null":
                    raise
                self._known[parts] = pa.nulls(len(self._group))
        return self._known[parts]

    def texts(self, parts: tuple[str, ...]) -> pa.StringArray:
        """Return the column's values as PostgreSQL writes them.

        :raises NoColumnError: as `column`.
        :raises pyarrow.ArrowNotImplementedError: if values of its type can't be written as text.
        """
        root, *members = parts
        if len(members) != 1 or root not in ("key", "before", "after", "value"):
            return texts_of(self.column(parts))
        image = "after" if root == "value" and self._group.is_change else root
        return column_texts(self._group, image, members[0], self.column(parts))

    def was_sent(self, parts: tuple[str, ...]) -> pa.Array:
        """Return in which records the source sent a column of the row after.

        :raises NoColumnError: as `column`.
        """
        self.column(parts)
        root, *members = parts
        asked = members if len(members) == 1 and root in ("after", "value") else []
        return pa.array(~not_sent(self._group, asked))

    def _column(self, parts: tuple[str, ...]) -> pa.Array:
        root, *members = parts
        if root == "value" and self._group.is_change:
            if not members:
                raise NoColumnError("a change has no value of its own: ask for before or after")
            root, *members = members
        if root in ("before", "after") and not self._group.is_change:
            raise NoColumnError(f"a record that is no longer a change has no row {root}: ask for its value")
        alone = self._group.member(root, members[0]) if members else None
        if alone is not None:
            return _below(alone, [root, *members], 2, self._group)
        return _below(root_column(self._group, root), [root, *members], 1, self._group)


def not_sent(group: Group, names: Iterable[str]) -> Flags:
    """Return in which records the source did not send one of these columns, because it stayed the same."""
    found = np.zeros(len(group), np.bool_)
    unchanged = group.column("unchanged")
    if pa.types.is_list(unchanged.type):
        named = pc.is_in(unchanged.flatten(), value_set=pa.array(names, pa.string()))
        found[pc.list_parent_indices(unchanged).filter(named).to_numpy()] = True
    return found


def _below(found: pa.Array, parts: list[str], first: int, group: Group) -> pa.Array:
    # Returns the member at the path `parts[first:]` of a column.
    for place in range(first, len(parts)):
        found = _member(found, parts[place], ".".join(parts[:place]), group)
    return found


def root_column(group: Group, name: str) -> pa.Array:
    """Return the column at the path `name`, of one part; nulls if there is none."""
    if name == "topic":
        return pa.repeat(pa.scalar(group.topic), len(group))
    wire = group.wire
    if wire is not None and name == "op":
        return string_array(np.arange(len(group) + 1, dtype=np.int32), wire.op)
    if wire is not None and name == "source":
        return wire.source()
    if name == "headers":
        return group.headers
    return group.column(name)


def _member(found: pa.Array, name: str, so_far: str, group: Group) -> pa.Array:
    arrow = found.type
    if pa.types.is_struct(arrow):
        if arrow.get_field_index(name) >= 0:
            return pc.struct_field(found, name)
        if so_far == "headers":
            return pa.nulls(len(found))
        raise NoColumnError(_unknown(name, so_far, group, [field.name for field in arrow]))
    if pa.types.is_map(arrow):
        return pc.map_lookup(found, pa.scalar(name, arrow.key_type), "first")
    if pa.types.is_null(arrow):
        return pa.nulls(len(found))
    raise NoColumnError(
        f"{so_far} of {described(group)} has no members; those of a JSON text are taken with ->> '{name}'"
    )


def _unknown(name: str, so_far: str, group: Group, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{so_far} of {described(group)} has no {name!r}{hint}"


def described(group: Group) -> str:
    """Return the name of a group's table, or else of its topic, for a message."""
    return group.topic if group.relation is None else group.relation.qualified_name


@contextlib.contextmanager
def fitting_expression(group: Group, what: str) -> Iterator[None]:
    """Raise `TRANSFORM_FAILED` in place of an `ExpressionError`; `what` was attempted."""
    try:
        yield
    except ExpressionError as error:
        raise TailraceError(
            Kind.TRANSFORM_FAILED,
            f"{what}: {error}",
            "correct the expression, or restrict the transformation by a predicate of tables",
            {"table": described(group)},
        ) from error


def computed(
    group: Group, expressions: Mapping[str, Expression], missing: str, what: str
) -> dict[str, pa.Array]:
    """Return the values of expressions by name; `what` is attempted with each.

    :param missing: as for `GroupRows`.
    :raises TailraceError: `TRANSFORM_FAILED` if an expression does not fit the records.
    """
    rows, found = GroupRows(group, missing), {}
    for name, expression in expressions.items():
        with fitting_expression(group, f"{what} {name!r}"):
            found[name] = expression.values(rows)
    return found


#: Names that differ from those in `source`.
_CALLED = {"txId": "xid"}


def metadata_column(group: Group, name: str) -> pa.Array:
    """Return a column of `config.transformations.steps.METADATA`; a prefix `source.` is ignored.

    Null where the records do not have it.
    """
    name = name.removeprefix("source.")
    count, rows = len(group), GroupRows(group, "null")
    if name in ("op", "topic"):
        return root_column(group, name)
    if name in ("unchanged", "special"):
        return group.column(name)
    if name in ("ts_ms", "ts_us", "ts_ns", "commit_time"):
        return _time(rows.column(("source", "commit_ts")), name)
    if name in ("name", "db", "version", "connector"):
        known = getattr(group.origin, {"db": "database"}.get(name, name), None)
        return pa.repeat(pa.scalar(known, pa.string()), count)
    if name == "xmin":
        return pa.nulls(count, pa.int64())
    if name == "snapshot":
        flags = pc.equal(root_column(group, "op").cast(pa.string()), "r")
        return pc.if_else(flags, "true", "false")
    if name == "sequence":
        return _sequence(rows)
    if name == "vgtid":
        shards = shards_of(root_column(group, "source"))
        return shards.of(vgtids(shards.positions))
    return rows.column(("source", _CALLED.get(name, name)))


def _time(times: pa.Array, name: str) -> pa.Array:
    if name == "commit_time" or not pa.types.is_timestamp(times.type):
        return times
    us = times.cast(pa.timestamp("us", tz=times.type.tz), safe=False).cast(pa.int64())
    if name == "ts_us":
        return us
    if name == "ts_ns":
        return pc.multiply(us, 1000)
    # Rounded down, not towards zero, as in the JSON converter: times before 1970 are negative.
    thousandths = pc.floor(pc.divide(us.cast(pa.float64(), safe=False), 1000.0))
    return thousandths.cast(pa.int64())


def _sequence(rows: GroupRows) -> pa.Array:
    commit, own = (rows.column(("source", name)).cast(pa.string()) for name in ("commit_lsn", "lsn"))
    return pc.binary_join_element_wise('["', commit, '","', own, '"]', "")
