"""What Debezium's Vitess connector says of a transaction's shard, as texts that its rows have in common.

A VGTID has the position of the row's own shard alone, as with `UseLocalVgtid`, or one task a shard: with all
of them, each record would be as long as there are shards.

Source: Debezium 3.6, Vgtid, VitessSourceInfoStructMaker, VitessOrderedTransactionStructMaker.
"""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.decode.gather import Cells, text_buffers
from tailrace.decode.json.documents import NOTHING_CODED, CodedTexts, Template, render
from tailrace.decode.json.json_kernel import CELL, CODED
from tailrace.decode.kernel import TEXT
from tailrace.decode.shards import RowShards, ShardPositions, full_names
from tailrace.decode.values import forms

#: Which list of texts is what: `json_kernel.CODED - SHARD_TEXT` stands for the shard in a template. Shard and
#: VGTID are what stands within the quotes of a JSON string.
SHARD_TEXT, VGTID_TEXT, EPOCH_TEXT, RANK_TEXT = range(4)

#: What stands for a position that is not known.
NO_VGTID = "[]"

# Made once: pyarrow looks for a module that may not be installed whenever it makes a scalar.
_VGTID_END, _NOTHING = pa.scalar('","table_p_ks":[]}]'), pa.scalar("")


def vgtids(positions: ShardPositions) -> pa.StringArray:
    """Return Debezium's VGTID of each transaction."""
    names = full_names(positions)
    before = [
        f'[{{"keyspace":{json.dumps(keyspace)},"shard":{json.dumps(shard)},"gtid":"'
        for keyspace, _, shard in (name.partition("/") for name in names.dictionary.to_pylist())
    ]
    opening = pa.array(before, pa.string()).take(names.indices)
    return pc.binary_join_element_wise(opening, positions.gtid, _VGTID_END, _NOTHING)


def ranks(positions: ShardPositions) -> pa.StringArray:
    """Return the rank of each transaction, in digits."""
    return pa.array(positions.rank).cast(pa.string())


def coded_texts(rows: RowShards, template: Template) -> CodedTexts:
    """Return what a template needs of the rows' shards."""
    if not any(CELL < slot <= CODED for _, slot in template):
        return NOTHING_CODED
    positions = rows.positions
    names = full_names(positions)
    shards = [json.dumps(name.partition("/")[2])[1:-1] for name in names.dictionary.to_pylist()]
    lists = (
        (pa.array(shards, pa.string()).take(names.indices), ""),
        (_escaped(vgtids(positions)), NO_VGTID),
        (pa.array(positions.epoch).cast(pa.string()), "0"),
        (_as_decimals(ranks(positions)), '"AA=="'),
    )
    # The last of each list is of rows whose shard is not known.
    texts = [pa.concat_arrays([found, pa.array([other])]) for found, other in lists]
    return CodedTexts(np.where(rows.places < 0, len(positions), rows.places), texts)


def _escaped(texts: pa.StringArray) -> pa.StringArray:
    return pc.replace_substring(pc.replace_substring(texts, "\\", "\\\\"), '"', '\\"')


def _as_decimals(digits: pa.StringArray) -> pa.StringArray:
    buffer, offsets = text_buffers(digits)
    start, length = offsets[:-1].astype(np.int32), np.diff(offsets).astype(np.int32)
    cells = Cells(buffer, start, length, np.full(len(digits), TEXT, np.uint8))
    return render(cells, forms.style_of(forms.UNSCALED)).cast(pa.string())
