"""Chains of transformations built from a file: errors with their places, and those of other packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailrace import config, extensions
from tailrace.config.transformations.options import FilterConfig
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline.preflight import preflight
from tailrace.records.group import Group
from tailrace.records.record import Record
from tailrace.transforms.factory import build
from tests.support.transforms.groups import applied, orders, places

GOOD = """\
name: shop
source: {type: postgresql, dsn: postgresql://cdc@db/shop}
log: {path: ./log}
engine:
  predicates:
    table: {type: table, tables: ["public.*"]}
    big: {type: expression, where: after.price > 6}
  transformations:
    - {type: filter, where: "op <> 'd'", predicate: table}
    - type: route
      regex: public\\.(.*)
      replacement: shop.$1
      predicate: big
      negate: true
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "pipeline.yaml"
    file.write_text(text)
    return file


def test_a_chain_is_built_from_a_file(tmp_path: Path) -> None:
    options = config.load_engine(written(tmp_path, GOOD)).engine
    chain = build(options.transformations, options.predicates)
    found = {int(p): group.topic for group in chain.apply(orders()) for p in group.index}
    assert found == {0: "shop.orders", 1: "shop.orders", 2: "public.orders", 3: "public.orders"}


def test_every_mistake_is_reported_with_its_place(tmp_path: Path) -> None:
    text = """\
name: shop
source: {type: postgresql, dsn: postgresql://cdc@db/shop}
log: {path: ./log}
engine:
  predicates:
    table:
      type: table
      tables: [orders]
    b: {type: operatio}
    c: {where: op}
    d:
      type: operation
      operations: [delete, upsert]
  transformations:
    - type: filter
      where: after.price >
      nul: drop
    - type: route
      topic: lowr(topic)
    - {type: routes}
    - {type: drop, negate: true}
    - {type: route, regex: "(", replacement: a}
    - {type: drop, predicate: tabel}
"""
    _, problems = config.read(written(tmp_path, text))
    known = "filter, drop, route, "
    predicates = "table, operation, topic, has_header, tombstone, expression"
    found = {problem.place: (problem.line, problem.message) for problem in problems}
    there = found.pop("engine.transformations[2].type")
    assert there[0] == 20
    assert there[1].startswith(f"must be one of {known}")
    assert there[1].endswith("or what an installed package offers; did you mean 'route'?")
    assert found == {
        "engine.predicates.table.tables[0]": (
            8,
            "must be of the form schema.table, such as public.orders or sales.*; or /a regular expression/",
        ),
        "engine.predicates.b.type": (
            9,
            f"must be one of {predicates}, or what an installed package offers; did you mean 'operation'?",
        ),
        "engine.predicates.c.type": (
            10,
            f"is required: one of {predicates}",
        ),
        "engine.predicates.d.operations[1]": (
            13,
            "must be one of 'read', 'create', 'update', 'delete', 'truncate' or 'message'",
        ),
        "engine.transformations[0].where": (
            16,
            "at character 14 of the expression: syntax error at the end",
        ),
        "engine.transformations[0].nul": (17, "unknown key; did you mean 'nulls'?"),
        "engine.transformations[1].topic": (
            19,
            "at character 1 of the expression: there is no function 'lowr'; did you mean 'lower'?",
        ),
        "engine.transformations[3]": (21, "negate needs a predicate"),
        "engine.transformations[5].predicate": (
            23,
            "is no name in engine.predicates: there are table, b, c, d; did you mean 'table'?",
        ),
        "engine.transformations[4].regex": (
            22,
            "is not a regular expression that Python supports: missing ), unterminated subpattern",
        ),
    }


class Halves:
    """Drops every other record."""

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self.closed = False

    def apply(self, group: Group) -> list[Group]:
        return [group.take(np.arange(self.first, len(group), 2))]

    def close(self) -> None:
        self.closed = True


class Twice(Halves):
    def apply(self, group: Group) -> list[Group]:
        return [group, group]


class Raises(Halves):
    def apply(self, group: Group) -> list[Group]:
        raise ValueError("secret")

    def close(self) -> None:
        raise OSError("closing")


class Shouts:
    def apply_record(self, record: Record) -> Record | None:
        return record.replace(topic=record.topic.upper())

    def close(self) -> None:
        pass


def test_objects_mappings_and_models_may_be_combined() -> None:
    halves = Halves()
    chain = build(
        [halves, {"type": "filter", "where": "op = 'c'"}, FilterConfig(where="after.id = 1"), Shouts()]
    )
    assert [(group.topic, group.index.tolist()) for group in chain.apply(orders())] == [
        ("PUBLIC.ORDERS", [0])
    ]
    chain.close()
    assert halves.closed


def test_a_package_offers_transformations_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.config.transformations.steps.names", lambda _: ("halves",))
    monkeypatch.setattr(extensions, "factory", lambda *_: Halves)
    assert places(applied(orders(), {"type": "halves", "first": 1})) == [1, 3]
    with pytest.raises(TailraceError, match=r"transformations\[0\]: its package refused") as caught:
        applied(orders(), {"type": "halves", "second": 1})
    assert caught.value.kind is Kind.CONFIG_INVALID


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            [{"type": "drop", "predicate": "none"}],
            r"transformations\[0\]\.predicate: there is no predicate 'none'",
        ),
        ([Halves(), object()], r"transformations\[1\]: object is not a transformation"),
        ([Halves], r"transformations\[0\]: the class Halves is not a transformation"),
        ([{"type": "filter", "where": "op ~ '('"}], r"transformations\[0\]\.where: at character 6 .* RE2"),
        ([{"type": "filter", "where": 1}], r"transformations\[0\]\.where: must be text"),
    ],
)
def test_an_invalid_chain_is_refused(given: list[Any], words: str) -> None:
    with pytest.raises(TailraceError, match=words) as caught:
        build(given)
    assert caught.value.kind is Kind.CONFIG_INVALID


@pytest.mark.parametrize("broken", [Twice(), Raises()])
def test_a_foreign_transformation_that_breaks_the_contract_is_reported(broken: Halves) -> None:
    with pytest.raises(TailraceError) as caught:
        build([Halves(), broken]).apply(orders())
    assert caught.value.kind is Kind.TASK_FAILED
    assert caught.value.context["transformation"] == f"transformations[1] {type(broken).__name__}"
    assert "secret" not in str(caught.value)


class Chooses:
    """Chooses what it is told to."""

    def __init__(self, flags: Any) -> None:
        self.flags = flags

    def matches(self, group: Group) -> Any:
        return self.flags


def test_a_foreign_predicate_may_return_a_list_and_one_that_returns_nothing_is_named() -> None:
    drop = [{"type": "drop", "predicate": "foreign"}]
    chosen = build(drop, {"foreign": Chooses([True, False, True, False, True])}).apply(orders())
    assert places(chosen) == [1, 3]
    with pytest.raises(TailraceError, match="its predicate returned object of shape") as caught:
        build(drop, {"foreign": Chooses(None)}).apply(orders())
    assert caught.value.context["transformation"] == "transformations[0] drop"


@pytest.mark.follows("task_failed")
def test_a_predicate_keeps_records_from_a_transformation_that_cannot_handle_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tailrace.config.transformations.steps.names", lambda _: ("raises",))
    monkeypatch.setattr(extensions, "factory", lambda *_: Raises)
    with pytest.raises(TailraceError) as caught:
        build([{"type": "raises"}]).apply(orders())
    assert "can be restricted by a predicate" in caught.value.hint
    predicates = {"others": {"type": "table", "tables": ["public.others"]}}
    chain = build([{"type": "raises", "predicate": "others"}], predicates)
    assert places(chain.apply(orders())) == [0, 1, 2, 3, 4]


def test_all_transformations_are_closed_although_one_fails() -> None:
    after = Halves()
    with pytest.raises(OSError, match="closing"):
        build([Raises(), after]).close()
    assert after.closed


def test_check_builds_the_chain_and_warns_that_it_does_not_apply_to_sinks(tmp_path: Path) -> None:
    options = config.load_engine(written(tmp_path, GOOD))
    assert list(preflight._transformations(options)) == []
    sinks = "sinks: [{type: jsonl, path: ./out}]\n"
    [found] = preflight._transformations(config.load_engine(written(tmp_path, GOOD + sinks)))
    assert "concern the handlers of tailrace.Engine" in found.message
    assert found.severity == "warning"
    with pytest.raises(TailraceError, match=r"transformations\[0\]\.where .* RE2"):
        config.load_engine(written(tmp_path, GOOD.replace("op <> 'd'", "op ~ '('")))
