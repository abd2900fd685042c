"""Chains, converters and groups are sent to other processes, with the same results there."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import yaml

from tailrace.config.transformations.options import TRANSFORMATIONS
from tailrace.config.transformations.predicates import PREDICATES
from tailrace.converters import (
    ArrowConverter,
    AvroConverter,
    CloudEventsConverter,
    Converter,
    JsonConverter,
    JsonSchemaConverter,
    PythonConverter,
)
from tailrace.errors import TailraceError
from tailrace.records.events import Converted
from tailrace.records.group import Group
from tailrace.transforms.factory import build
from tests.support.converters.registry import FakeRegistry
from tests.support.decode.wire import insert
from tests.support.transforms.groups import orders, rows
from tests.support.transforms.page_examples import EXAMPLES

#: Transformations whose settings no example on the page shows.
OTHERS: list[dict[str, Any]] = [
    {"type": "rename", "fields": {"note": "remark"}},
    {"type": "drop_fields", "fields": ["note"]},
    {"type": "mask", "fields": ["note"], "method": "hash", "salt": "${env:TAILRACE_TEST_SALT}"},
    {"type": "cast", "fields": {"id": "string"}},
    {"type": "timestamps", "fields": ["id"], "to": "timestamp", "predicate": "topic"},
    {"type": "set_headers", "headers": {"of": "source.table"}, "predicate": "expression"},
    {"type": "drop_headers", "headers": ["of"], "predicate": "has_header"},
    {"type": "fields_from_headers", "fields": {"whose": "of"}, "predicate": "has_header"},
    {"type": "value_to_key", "fields": ["id", "note"]},
    {"type": "extract_field", "field": "id", "predicate": "tombstone", "negate": True},
    {"type": "hoist_field", "field": "order"},
]
CHOICES: dict[str, dict[str, Any]] = {
    "topic": {"type": "topic", "pattern": "public\\..*"},
    "expression": {"type": "expression", "where": "after.id > 1"},
    "has_header": {"type": "has_header", "name": "of"},
    "tombstone": {"type": "tombstone"},
}
SECTIONS = [yaml.safe_load(text) for text in EXAMPLES]
SHOWN = [one.get("engine", one) if isinstance(one, dict) else {"transformations": one} for one in SECTIONS]
ENGINES = [*SHOWN, *({"transformations": [one], "predicates": CHOICES} for one in OTHERS)]


def outcome(chain: Any, group: Group) -> Any:
    try:
        return [(made.topic, rows([made])) for made in chain.apply(group)]
    except TailraceError as error:
        return error.kind, error.message, error.context


@pytest.mark.parametrize("engine", ENGINES)
def test_a_chain_gives_the_same_in_another_process(
    engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAILRACE_TEST_SALT", "salt")
    chain = build(engine["transformations"], engine.get("predicates"))
    there, group = pickle.loads(pickle.dumps((chain, orders())))  # noqa: S301 - made here
    assert outcome(there, group) == outcome(chain, orders())


def test_every_kind_of_transformation_is_tested() -> None:
    steps = [step for engine in ENGINES for step in engine["transformations"]]
    assert {step["type"] for step in steps} == set(TRANSFORMATIONS)
    chosen = [one for engine in ENGINES for one in engine.get("predicates", {}).values()]
    assert {one["type"] for one in chosen} == set(PREDICATES)


@pytest.mark.parametrize(
    "converter",
    [
        JsonConverter(),
        JsonConverter(schemas_enable=True),
        CloudEventsConverter(),
        ArrowConverter(),
        PythonConverter(),
    ],
)
def test_a_converter_gives_the_same_in_another_process(converter: Converter) -> None:
    there, group = pickle.loads(pickle.dumps((converter, orders())))  # noqa: S301 - made here
    assert_same(converter.convert(orders()), there.convert(group))


@pytest.mark.parametrize("kind", [AvroConverter, JsonSchemaConverter])
def test_a_converter_with_a_registry_gets_the_same_schemas_in_another_process(kind: Any) -> None:
    """Its cache stays here: the copy asks the registry again, which gives the same ids."""
    with FakeRegistry() as registry:
        converter, numbers = kind(registry_url=registry.url), orders(insert("1", "first", "5.00"))
        before, group = pickle.loads(pickle.dumps((converter, numbers)))  # noqa: S301 - made here
        assert_same(converter.convert(numbers), before.convert(group))
        after = pickle.loads(pickle.dumps(converter))  # noqa: S301 - made here
        assert_same(converter.convert(numbers), after.convert(group))
        assert len(registry.schemas) == 2


def assert_same(here: Converted, found: Converted) -> None:
    assert list(found.values) == list(here.values)
    assert list(found.keys) == list(here.keys)  # type: ignore[arg-type]
    again = pickle.loads(pickle.dumps(found))  # noqa: S301 - made here
    assert list(again.values) == list(here.values)
