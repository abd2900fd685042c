"""Members of JSON documents found by the compiled scan, compared with Python's parser."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.decode.json.members import members
from tailrace.decode.values.json_texts import plain_end

FIELDS = [
    ("transaction", pa.struct([("id", pa.string()), ("total_order", pa.int64())])),
    ("source", pa.struct([("sequence", pa.string())])),
    ("op", pa.string()),
]
LEAVES = [("transaction", "id"), ("transaction", "total_order"), ("source", "sequence"), ("op",)]
NUMBER = ("transaction", "total_order")
TOO_LARGE = 10**18


class Pairs(tuple[tuple[str, Any], ...]):
    """An object as it is written: a name may occur twice."""

    __slots__ = ()


class UnsureError(Exception):
    """The scan must leave the document to a parser."""


def written(value: Any, ascii_only: bool, space: str) -> str:
    def text(inner: Any) -> str:
        return written(inner, ascii_only, space)

    if isinstance(value, Pairs):
        of = [f"{text(name)}{space}:{text(each)}" for name, each in value]
        return "{" + space + f"{space},".join(of) + "}" + space
    if isinstance(value, list):
        return "[" + ",".join(map(text, value)) + space + "]"
    return json.dumps(value, ensure_ascii=ascii_only)


def member(of: Pairs, name: str) -> Any:
    found = [value for own, value in of if own == name]
    if len(found) > 1:
        raise UnsureError
    return found[0] if found else None


def leaf(root: Pairs, path: tuple[str, ...]) -> Any:
    value: Any = root
    for name in path:
        if value is None:
            return None
        if not isinstance(value, Pairs):
            raise UnsureError
        value = member(value, name)
    if value is None:
        return None
    is_good = type(value) is int and abs(value) < TOO_LARGE if path == NUMBER else type(value) is str
    if not is_good:
        raise UnsureError
    return value


def refuse(_constant: str) -> None:
    raise ValueError


def expected(document: bytes | None) -> list[Any]:
    """Return the leaves according to Python's parser and the rule for `payload`."""
    if document is None:
        return [None] * len(LEAVES)
    try:
        text = document.decode(errors="surrogateescape")
        root = json.loads(text, object_pairs_hook=Pairs, parse_constant=refuse)
    except ValueError:
        raise UnsureError from None
    if not isinstance(root, Pairs):
        raise UnsureError
    payload = member(root, "payload")
    if payload is None:
        payload = Pairs()
    if not isinstance(payload, Pairs):
        raise UnsureError
    both = [(leaf(payload, path), leaf(root, path)) for path in LEAVES]
    return [inner if inner is not None else outer for inner, outer in both]


def found(*documents: bytes | None) -> list[list[Any]] | None:
    return found_in(pa.array(documents, pa.binary()))


def found_in(documents: pa.BinaryArray) -> list[list[Any]] | None:
    columns = members(documents, FIELDS)
    if columns is None:
        return None
    for column in columns.values():
        column.validate(full=True)
    rows = pa.table(columns).to_pylist()
    return [[row[path[0]] if len(path) == 1 else row[path[0]][path[1]] for path in LEAVES] for row in rows]


names = st.sampled_from(
    ["transaction", "id", "total_order", "source", "sequence", "op", "payload", "before", "ö"]
)
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(st.tuples(names | st.text(), inner), max_size=4).map(Pairs)
    ),
    max_leaves=12,
)
plain = st.text(st.characters(min_codepoint=32, max_codepoint=126) | st.sampled_from('\n\t\r\b\f"\\/'))
change = st.fixed_dictionaries(
    {},
    optional={
        "before": values,
        "transaction": st.none()
        | st.fixed_dictionaries(
            {},
            optional={
                "id": st.none() | plain,
                "total_order": st.none() | st.integers(1 - TOO_LARGE, TOO_LARGE - 1),
                "data_collection_order": values,
            },
        ).map(lambda found: Pairs(found.items())),
        "source": st.none()
        | st.fixed_dictionaries({"lsn": values}, optional={"sequence": st.none() | plain}).map(
            lambda found: Pairs(found.items())
        ),
        "op": st.none() | plain,
    },
).map(lambda found: Pairs(found.items()))
envelopes = st.tuples(values, change).map(lambda both: Pairs([("schema", both[0]), ("payload", both[1])]))
space = st.sampled_from(["", " ", "\n\t", "\r\n  "])


@given(st.lists(st.tuples(change | envelopes, st.booleans(), space), max_size=5), st.integers(0, 4))
def test_members_of_usual_documents_are_found(documents: list[tuple[Pairs, bool, str]], first: int) -> None:
    texts: list[bytes | None] = [
        written(each, ascii_only, between).encode("utf-8", "surrogatepass")
        for each, ascii_only, between in documents
    ]
    texts.append(None)
    part = pa.array([b"?", *texts], pa.binary()).slice(1 + first)
    assert found_in(part) == [expected(each) for each in texts[first:]]


@given(st.lists(st.tuples(names, values), max_size=5).map(Pairs) | values, st.booleans(), space, st.data())
def test_no_document_is_read_differently_than_by_a_parser(
    value: Any, ascii_only: bool, between: str, data: st.DataObject
) -> None:
    text = bytearray(written(value, ascii_only, between).encode("utf-8", "surrogatepass"))
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, len(text)))
        text[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.sampled_from(
                [b"", b'"', b"\\", b",", b":", b"{", b"}", b"]", b"0", b"-", b"e", b"n", b" ", b"\0"]
            )
        )
    try:
        wanted = [expected(bytes(text))]
    except UnsureError:
        assert found(bytes(text)) is None
    else:
        assert found(bytes(text)) in (None, wanted)


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "{", '{"op":"c"', '{"op":"c",}', '{"op"}', '{"op":}', '{,"op":"c"}',
        '{"op";"c"}', '{"op":"c";"a":1}', '{"op":"c"}{}', '["op"]',
        '{"op":"c","op":"d"}', '{"op":"c","payload":{"op":"d"}}', r'{"\u006fp":"c"}', r'{"op":"\u0063"}',
        '{"op":1}', '{"op":["c"]}', '{"op":{}}', '{"op":true}', '{"transaction":"1"}', '{"transaction":[]}',
        '{"transaction":{"total_order":1.0}}', '{"transaction":{"total_order":01}}',
        '{"transaction":{"total_order":1e3}}', '{"transaction":{"total_order":"1"}}',
        '{"transaction":{"total_order":1000000000000000000}}', '{"transaction":{"total_order":-}}',
        '{"a":' + "[" * 99 + "]" * 99 + "}", '{"op":"é"}', '{"payload":1}',
    ],
)  # fmt: skip
def test_documents_that_the_scan_does_not_know_are_left_to_a_parser(text: str) -> None:
    assert found(text.encode()) is None
    assert found(b'{"op":"c"}', text.encode(), None) is None
    for end in range(len(text)):
        found(text[:end].encode())


def test_nothing_after_a_document_is_read() -> None:
    # Each is cut from a longer text: what follows would complete it.
    whole = b'{"op":"c","transaction":{"id":"7:1","total_order":12}}'
    for end in range(len(whole)):
        ends = pa.py_buffer(pa.array([0, end], pa.int32()).buffers()[1])
        cut = pa.BinaryArray.from_buffers(pa.binary(), 1, [None, ends, pa.py_buffer(whole)])
        assert members(cut, FIELDS) is None
    assert found(whole) == [["7:1", 12, None, "c"]]


@pytest.mark.parametrize("length", [1, 7, 8, 9, 17, 24])
def test_every_byte_that_ends_plain_text_is_found_at_every_position(length: int) -> None:
    for code in range(256):
        is_plain = code >= 32 and chr(code) not in '"\\'
        for place in range(length):
            text = bytearray(b"z" * length)
            text[place] = code
            # Bytes after the first one, and before the start of the search, change nothing.
            text[place + 1 :] = b"\x01" * (length - place - 1)
            wanted = place if not is_plain else min(place + 1, length)
            found = plain_end(np.frombuffer(b'"' + bytes(text) + b'"', np.uint8), 1, length + 1)
            assert found - 1 == wanted, (code, place)
