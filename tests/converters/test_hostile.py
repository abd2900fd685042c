"""For any bytes converters return JSON or a named error, and write only within their buffers."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tailrace.converters.debezium import JsonConverter
from tailrace.decode.changes import decode_block
from tailrace.decode.json import json_kernel
from tailrace.decode.kernel import TEXT
from tailrace.decode.values import forms
from tailrace.errors import TailraceError
from tailrace.model import ValueModes
from tailrace.records.group import Group
from tests.support.converters.customers import FACTS, as_columns
from tests.support.decode.hostile import SHAPE, require_named, seed
from tests.support.decode.wire import block, column, vector
from tests.support.examples import examples

CONVERTERS = (JsonConverter(schemas_enable=True, provide_transaction_metadata=True),)
DOUBLES = ValueModes("double", "nanoseconds", "numeric", "hex", "map")

#: What surrounds the space that a kernel may write to, and must not change.
FENCE = 0xA5


def survive(data: bytes, modes: ValueModes = ValueModes()) -> None:  # noqa: B008 - frozen
    """Convert changes from frames and from columns; allow only the named errors."""
    try:
        found = decode_block(block(data), 0, None, (SHAPE,), modes=modes)
    except TailraceError as error:
        require_named(error)
        return
    for changes in found:
        group = Group.of_changes("t", np.arange(changes.count), changes, FACTS)
        for converter in CONVERTERS:
            for transformed in (False, True):
                try:
                    made = converter.convert(as_columns(group) if transformed else group)
                except TailraceError as error:
                    require_named(error)
                else:
                    made.values.validate(full=True)
                    for text in [*made.values.to_pylist(), *(made.keys.to_pylist() if made.keys else [])]:
                        if text is not None:
                            json.loads(text)


@examples(60)
@given(st.data())
def test_mutations_are_survived(data: st.DataObject) -> None:
    mutated = bytearray(seed())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(mutated) - 1))
        if data.draw(st.booleans()):
            mutated[at] = data.draw(st.integers(0, 255))
        else:
            del mutated[at : at + data.draw(st.integers(1, 20))]
        mutated = mutated or bytearray(b"d")
    survive(bytes(mutated), data.draw(st.sampled_from([ValueModes(), DOUBLES])))


@pytest.mark.slow
def test_flips_in_real_streams_are_survived() -> None:
    rng = random.Random(21)
    for name in ("types", "updates", "ddl"):
        whole = bytes.fromhex(vector(name)["frames"])
        for _ in range(8):
            mutated = bytearray(whole)
            for _ in range(rng.randint(1, 5)):
                mutated[rng.randrange(len(mutated))] = rng.randrange(256)
            survive(bytes(mutated), rng.choice([ValueModes(), DOUBLES]))


def test_the_seed_itself_is_converted() -> None:
    survive(seed())


STYLES = [
    forms.QUOTED, forms.INTEGER, forms.FLOATING, forms.BOOLEAN, forms.BASE64, forms.DAYS, forms.STAMP_NS,
    forms.TIME_US, forms.INTERVAL_US, forms.ISO_UTC, forms.ISO_TIME_UTC, forms.ISO_INTERVAL, forms.HEX_BASE64,
    forms.style_of(forms.AMOUNT, 10), forms.style_of(forms.UNSCALED, 2),
    forms.style_of(forms.AMOUNT_UNSCALED, 3), forms.PAIRS, forms.DOUBLE, forms.VARIABLE_SCALE,
    forms.PAIRS_QUOTED, forms.JAVA, forms.BIT, forms.BITS, forms.RAW,
]  # fmt: skip
LETTERS = st.text('{}[],"\\x0123456789-+.eE:tfNULnaiy BC=>\x01é', max_size=30)


@examples(150)
@given(st.lists(LETTERS | LETTERS.map(lambda text: "1" * 200 + text), min_size=1, max_size=5), st.booleans())
@example(["\x01" * 40], False)
@example(["0" * 25, "1e400", "-0." + "0" * 40 + "1"], False)
@example(["{" + ",".join("1" * 500) + "}"], True)
def test_no_style_writes_outside_its_buffer(texts: list[str], array: bool) -> None:
    encoded = [text.encode() for text in texts]
    buffer = np.frombuffer(b"".join(encoded), np.uint8)
    lengths = np.array([len(text) for text in encoded], np.int32)
    starts = (np.cumsum(lengths) - lengths).astype(np.int32)
    kind = np.full(len(texts), TEXT, np.uint8)
    for style in STYLES:
        chosen = forms.array_style(style, ",") if array else style
        own = array and forms.form_of(style) >= forms.NUMBERS
        growth = json_kernel.GROWTH_OF_ITEMS if own else json_kernel.GROWTH
        room = int(lengths.sum()) * growth + len(texts) * json_kernel.GROWTH_FIXED
        whole = np.full(room + 128, FENCE, np.uint8)
        ends, scratch = np.empty(len(texts), np.int64), np.empty(int(lengths.max()) + 1, np.uint8)
        after, used, _ = json_kernel.write_values(
            buffer, 0, starts, lengths, kind, chosen, scratch, whole[64 : 64 + room], ends
        )
        assert after == len(texts)
        assert used <= room
        assert (whole[:64] == FENCE).all()
        assert (whole[64 + room :] == FENCE).all()


@pytest.mark.parametrize("kind", [701, 700, 1560, 1562, 1700])
@examples(40)
@given(values=st.lists(LETTERS, min_size=1, max_size=5))
def test_values_in_another_form_than_their_types_are_valid_json(kind: int, values: list[str]) -> None:
    changes = column(kind, values)
    group = Group.of_changes("t", np.arange(changes.count), changes, FACTS)
    wire = JsonConverter().convert(group).values.to_pylist()
    assert len([json.loads(text) for text in wire]) == len(values)
    if kind != 1700:
        columns = JsonConverter().convert(as_columns(group)).values.to_pylist()
        assert len([json.loads(text) for text in columns]) == len(values)
