"""Ordering keys: the keyed dispatcher delivers records that share one in order.

Records with different ordering keys are delivered in parallel. An ordering key is a fingerprint of the
delivered key, whatever the table, or of the table if there is no key. An update that changed the key has
those of both keys; a TRUNCATE has all of them, and so has the first record of a table whose key has another
type than before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.model import Op
from tailrace.records.fingerprints import Fingerprints, fingerprint_of, fingerprints
from tailrace.records.group import Group, Places


@dataclass(frozen=True, slots=True, eq=False)
class OrderingKeys:
    """The ordering keys of each record of a group.

    :param own: the ordering key of the record's key.
    :param other: the ordering key of its former key; `own` if the key did not change.
    :param in_all: whether the record has all ordering keys.
    :param key_type: of the keys: fingerprints of keys of different types are not comparable.
    """

    own: Fingerprints
    other: Fingerprints
    in_all: npt.NDArray[np.bool_]
    key_type: pa.DataType


def in_order(
    keys: Sequence[OrderingKeys], rows: Places
) -> tuple[Fingerprints, Fingerprints, npt.NDArray[np.bool_]]:
    """Return `own`, `other` and `in_all` of the records of a batch.

    :param keys: of its groups.
    :param rows: the order of its records (`Batch.rows`).
    """
    return (
        np.concatenate([found.own for found in keys])[rows],
        np.concatenate([found.other for found in keys])[rows],
        np.concatenate([found.in_all for found in keys])[rows],
    )


class KeyTypes:
    """The type of each topic's keys, as of the last batch."""

    def __init__(self) -> None:
        self._types: dict[str, pa.DataType] = {}

    def note(self, topic: str, keys: OrderingKeys) -> None:
        """Make the first record wait for all earlier ones if its key's type differs from the last one."""
        if self._types.setdefault(topic, keys.key_type) != keys.key_type:
            self._types[topic] = keys.key_type
            keys.in_all[0] = True


@dataclass(frozen=True, slots=True, eq=False)
class Moved:
    """Records that changed their key: places, rising, and their former ordering keys."""

    places: Places
    keys: Fingerprints


def ordering_keys_of(group: Group, moved: Moved | None) -> OrderingKeys:
    """Return the ordering keys of the records of a group.

    :param moved: changed keys of the records that these were made from, and of others.
    """
    key = group.keys
    own = fingerprints(key)
    if key.null_count:
        table = group.topic if group.relation is None else group.relation.qualified_name
        own[np.asarray(pc.is_null(key))] = fingerprint_of(table)
    other = own.copy()
    if moved is not None:
        at = np.minimum(np.searchsorted(moved.places, group.index), len(moved.places) - 1)
        found = moved.places[at] == group.index
        other[found] = moved.keys[at[found]]
    return OrderingKeys(own, other, _is(group, Op.TRUNCATE), key.type)


def moved_of(group: Group) -> Moved | None:
    """Return the changes of a group that changed the key, as the source sent them; None: there are none."""
    if not group.is_change:
        return None
    if group.wire is not None:
        old = group.wire.old_keys() if group.wire.relation is not None else None
        if old is None:
            return None
        rows = np.searchsorted(group.wire.log_offset, old.column("_log_offset").to_numpy())
        columns = [old.column(n) for n in range(old.num_columns - 2)]
        keys = fingerprints(pa.StructArray.from_arrays(columns, names=old.schema.names[:-2]))
        return Moved(group.index[rows], keys)
    rows, keys = _former_keys(group)
    differs = keys != fingerprints(group.column("key").take(pa.array(rows)))
    return Moved(group.index[rows[differs]], keys[differs]) if differs.any() else None


def transformed_keys_of(group: Group, source: Group) -> OrderingKeys:
    """Return the ordering keys of records that transformations made from those of `source`.

    The former key is a delivered key, too. If it is not known, a record that changed its key has all of them.
    """
    keys = ordering_keys_of(group, moved_of(group))
    if group.wire is not None or group.is_second is not None or (moved := moved_of(source)) is None:
        return keys
    known, _ = _former_keys(group)
    rows = np.setdiff1d(np.flatnonzero(np.isin(group.index, moved.places)), known)
    before = ordering_keys_of(source, moved)
    at = np.searchsorted(source.index, group.index[rows])
    # If transformations left a key unchanged, they left the former key unchanged, too.
    is_same = keys.own[rows] == before.own[at]
    keys.other[rows[is_same]] = before.other[at[is_same]]
    keys.in_all[rows[~is_same]] = True
    return keys


def _former_keys(group: Group) -> tuple[Places, Fingerprints]:
    """Return the updates whose old row contains the former key, and the fingerprints of that key."""
    key, before, after = (group.column(name) for name in ("key", "before", "after"))
    none = np.empty(0, np.int64), np.empty(0, np.uint64)
    if not (pa.types.is_struct(key.type) and pa.types.is_struct(before.type)):
        return none
    names = key.type.names
    rows = np.flatnonzero(_is(group, Op.UPDATE) & np.asarray(pc.is_valid(before)))
    if not (len(rows) and set(names) <= set(before.type.names)):
        return none
    if pa.types.is_struct(after.type) and set(names) <= set(after.type.names):
        # Where the key differs from that in the new row, only one was transformed: don't use the old row.
        rows = rows[_of_row(after, names, rows) == fingerprints(key.take(pa.array(rows)))]
    return rows, _of_row(before, names, rows)


def _of_row(image: pa.Array, names: Sequence[str], rows: Places) -> Fingerprints:
    taken = image.take(pa.array(rows))
    fields = dict(zip(taken.type.names, taken.flatten(), strict=True))
    return fingerprints(pa.StructArray.from_arrays([fields[name] for name in names], names=names))


def _is(group: Group, op: Op) -> npt.NDArray[np.bool_]:
    if group.wire is not None:
        return np.asarray(group.wire.op == ord(op))
    column = group.column("op")
    if pa.types.is_null(column.type):
        return np.zeros(len(group), np.bool_)
    return np.asarray(pc.fill_null(pc.equal(column, str(op)), False))
