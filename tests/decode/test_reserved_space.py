"""No value writes past the space reserved for it, whatever its type, mode and number of items."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tailrace.converters.debezium_types import debezium_modes, type_mapping
from tailrace.decode.json import json_kernel
from tailrace.decode.postgres_types import BUILT_IN
from tailrace.decode.types import value_type
from tailrace.model import OWN_FORMS, ValueModes, ValueType

#: Short texts of a type: those that grow most in proportion to their length.
SHORT = {
    "bool": ["t"], "bytea": ["\\x"], "date": ["0001-01-01 BC", "infinity"], "money": ["1", "$1", "-1"],
    "interval": ["1 day", "00:00:00"], "time": ["00:00:00"], "timetz": ["00:00:00+00"],
    "timestamp": ["0001-01-01 00:00:00", "infinity"], "timestamptz": ["0001-01-01 00:00:00+00", "infinity"],
    "text": ["\x01", '"', ""], "numeric": ["1", "-1", "1.5", "NaN"], "bit": ["0"], "varbit": ["1"],
}  # fmt: skip
EDGE = 5  # items of `numeric[]` for which more space was reserved than they needed
MODES = [
    OWN_FORMS,
    debezium_modes(OWN_FORMS),
    ValueModes("double", "isostring", "string", "hex", "map", 10),
    ValueModes("string", "nanoseconds", "numeric", "base64-url-safe", "json", 10),
    ValueModes("precise", "connect", "string", "base64", "json", 10),
]


def styles(oid: int, item: int | None, modes: ValueModes) -> Iterator[int]:
    value = ValueType(oid) if item is None else ValueType(oid, item=ValueType(item))
    yield value_type(value, modes).json
    yield type_mapping(value, debezium_modes(modes)).style


def quoted(item: str) -> str:
    return (
        '"' + item.replace("\\", "\\\\").replace('"', '\\"') + '"'
        if not item or set(item) & set('"\\ ')
        else item
    )


def require_room(style: int, text: str) -> None:
    buffer = np.frombuffer(text.encode() + bytes(8), np.uint8)
    size = len(text.encode())
    start, length = np.zeros(1, np.int32), np.array([size], np.int32)
    cells = (start, length, np.array([ord("t")], np.uint8))
    scratch, ends = np.empty(size + 1, np.uint8), np.empty(1, np.int64)
    nothing = np.empty(0, np.uint8)
    _, _, need = json_kernel.write_values(buffer, 0, *cells, style, scratch, nothing, ends)
    whole = np.full(need + 32 * size + 4096, 0xA5, np.uint8)
    after, used, _ = json_kernel.write_values(buffer, 0, *cells, style, scratch, whole[:need], ends)
    assert after == 1
    assert used <= need, f"{text[:20]!r} in style {style}"
    assert (whole[need:] == 0xA5).all()


@pytest.mark.parametrize(("oid", "name", "array"), BUILT_IN, ids=[name for _, name, _ in BUILT_IN])
def test_a_value_is_written_within_its_space(oid: int, name: str, array: int) -> None:
    for modes in MODES:
        for text in SHORT.get(name, ["1", "\x01", '"', ""]):
            for style in styles(oid, None, modes):
                require_room(style, text)
                require_room(style, text * 100)
            for items in (1, EDGE, EDGE + 1, 100 * EDGE):
                for style in styles(array, oid, modes):
                    require_room(style, "{" + ",".join([quoted(text)] * items) + "}")
                    require_room(style, "{" + ",".join(["{" + quoted(text) + "}"] * items) + "}")
