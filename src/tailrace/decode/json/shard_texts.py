"""The fields of Debezium's Vitess connector about a transaction's shard, as texts that its rows share.

A VGTID has only the position of the row's own shard, as with `UseLocalVgtid` or one task per shard: with
all positions, the size of each record would grow with the number of shards.

Source: Debezium 3.6, Vgtid, VitessSourceInfoStructMaker, VitessOrderedTransactionStructMaker.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.decode.gather import text_cells
from tailrace.decode.json.documents import NOTHING_CODED, CodedTexts, render
from tailrace.decode.json.json_kernel import CELL, CODED
from tailrace.decode.json.templates import Template
from tailrace.decode.shards import RowShards, ShardPositions, full_names
from tailrace.decode.values import forms

#: Numbers of the lists of texts: `json_kernel.CODED - SHARD_TEXT` refers to the shard in a template. Shard
#: and VGTID are the content of a JSON string, without its quotes.
SHARD_TEXT, VGTID_TEXT, EPOCH_TEXT, RANK_TEXT = range(4)

#: VGTID of an unknown position.
NO_VGTID = "[]"

# Created once: for every scalar, pyarrow tries to import a module that may not be installed.
_VGTID_END, _VGTID_END_ESCAPED, _NOTHING = (
    pa.scalar(text) for text in ('","table_p_ks":[]}]', '\\",\\"table_p_ks\\":[]}]', "")
)


def vgtids(positions: ShardPositions, *, escaped: bool = False) -> pa.StringArray:
    """Return Debezium's VGTID of each transaction.

    :param escaped: escape it as the content of a JSON string. Positions need no escapes.
    """
    names = full_names(positions)
    before = [
        f'[{{"keyspace":{json.dumps(keyspace)},"shard":{json.dumps(shard)},"gtid":"'
        for keyspace, _, shard in (name.partition("/") for name in names.dictionary.to_pylist())
    ]
    end = _VGTID_END
    if escaped:
        before, end = [json.dumps(text)[1:-1] for text in before], _VGTID_END_ESCAPED
    opening = pa.array(before, pa.string()).take(names.indices)
    return pc.binary_join_element_wise(opening, positions.gtid, end, _NOTHING)


def ranks(positions: ShardPositions) -> pa.StringArray:
    """Return the rank of each transaction, in decimal digits."""
    return pa.array(positions.rank).cast(pa.string())


def coded_texts(rows: RowShards, template: Template) -> CodedTexts:
    """Return the texts about the rows' shards that a template refers to."""
    wanted = {CODED - slot for _, slot in template if CELL < slot <= CODED}
    if not wanted:
        return NOTHING_CODED
    positions = rows.positions
    # The content of each list, and its last text, for rows whose shard is not known.
    lists: list[tuple[Callable[[ShardPositions], pa.Array], str]] = [
        (_shards, ""),
        (functools.partial(vgtids, escaped=True), NO_VGTID),
        (lambda found: pa.array(found.epoch).cast(pa.string()), "0"),
        (lambda found: _as_decimals(ranks(found)), '"AA=="'),
    ]
    texts = [
        pa.concat_arrays([made(positions), pa.array([other])])
        if number in wanted
        else pa.repeat(_NOTHING, len(positions) + 1)
        for number, (made, other) in enumerate(lists)
    ]
    return CodedTexts(np.where(rows.places < 0, len(positions), rows.places), texts)


def _shards(positions: ShardPositions) -> pa.StringArray:
    names = full_names(positions)
    own = [json.dumps(name.partition("/")[2])[1:-1] for name in names.dictionary.to_pylist()]
    return pa.array(own, pa.string()).take(names.indices)


def _as_decimals(digits: pa.StringArray) -> pa.StringArray:
    return render(text_cells(digits), forms.style_of(forms.UNSCALED)).cast(pa.string())
