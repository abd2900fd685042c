"""A document's description becomes constants, each followed by a slot."""

from __future__ import annotations

import pytest

from tailrace.decode.json.json_kernel import AFTER, NOTHING, OP_LETTER, UNLESS
from tailrace.decode.json.templates import Json, Part, Slot, Template, Text, Unless, template

CASES: list[tuple[Part, Template]] = [
    ("a", [('"a"', NOTHING)]),
    (None, [("null", NOTHING)]),
    (7, [("7", NOTHING)]),
    (Slot(3), [("", 3)]),
    ({}, [("{}", NOTHING)]),
    ({"after": Slot(AFTER), "n": None}, [('{"after":', AFTER), (',"n":null}', NOTHING)]),
    (Text((OP_LETTER,)), [('"', OP_LETTER), ('"', NOTHING)]),
    (Text(('["', 4, '"]')), [('"[\\"', 4), ('\\"]"', NOTHING)]),
    (
        {"a": {"b": Json('{"c":1}')}, "d\n": 'e"', "é": "ü"},
        [('{"a":{"b":{"c":1}},"d\\n":"e\\"","é":"ü"}', NOTHING)],
    ),
    (
        {"a": Unless(5, {"b": Slot(5), "c": Slot(6)}), "d": 1},
        [('{"a":', UNLESS | 3 << 8 | 5), ('{"b":', 5), (',"c":', 6), ("}", NOTHING), (',"d":1}', NOTHING)],
    ),
    (Unless(5, Slot(6)), [("", UNLESS | 1 << 8 | 5), ("", 6)]),
]


@pytest.mark.parametrize(("document", "expected"), CASES)
def test_constants_are_joined_up_to_the_next_slot(document: Part, expected: Template) -> None:
    assert template(document) == expected


def test_characters_beyond_ascii_may_be_escaped_and_documents_have_an_ending() -> None:
    assert template({"é": Slot(1)}, ensure_ascii=True, ending="\n") == [('{"\\u00e9":', 1), ("}\n", NOTHING)]
    assert template(Slot(1), ending="\n") == [("", 1), ("\n", NOTHING)]
