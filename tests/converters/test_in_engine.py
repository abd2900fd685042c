"""Converters in an engine, found by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tailrace import Engine, converters
from tailrace.testing import LinesSource


@pytest.mark.parametrize("name", ["json", "arrow", "python"])
def test_a_converter_is_found_by_its_name(name: str) -> None:
    found: list[Any] = []
    Engine(connector=LinesSource(5), on_record=found.append, converter=name).run()
    assert [event.record.place for event in found] == list(range(5))
    key, value = found[-1].key, found[-1].value
    if name == "json":
        key, value = json.loads(key), json.loads(value)
    assert key == {"number": 5}
    assert (value["op"], value["after"]["number"], value["source"]["number"]) == ("c", 5, 5)


def test_options_are_given_with_the_type() -> None:
    found: list[Any] = []
    options = {"converter": {"type": "json", "schemas_enable": True}}
    Engine(connector=LinesSource(1), on_record=found.append, options=options).run()
    document = json.loads(found[0].value)
    assert document["schema"]["name"].endswith(".Envelope")
    assert document["payload"]["after"]["number"] == 1


def test_the_converters_of_this_package_are_found_by_name() -> None:
    for name in converters.__all__:
        assert getattr(converters, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing"):
        _ = converters.nothing
