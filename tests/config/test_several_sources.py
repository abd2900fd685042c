"""A file with `sources`: what it means, and its possible problems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import ValidationError

from tailrace import config
from tailrace.config import EngineConfig, PipelineConfig
from tailrace.config.load import from_mapping
from tailrace.errors import Kind, TailraceError

GOOD = """\
name: shop
sources:
  - {name: eu, dsn: postgresql://cdc@eu.example/shop}
  - {name: us, dsn: postgresql://cdc@us.example/shop, slot: mine, tables: [sales.*]}
tasks_max: 2
log: {path: ./logs}
sinks:
  - {type: delta, path: ./lake}
  - {type: jsonl, path: ./lines, name: lines}
"""


def read(directory: Path, text: str) -> dict[str, str]:
    file = directory / "pipeline.yaml"
    file.write_text(text)
    found, problems = config.read(file)
    assert (found is None) == bool(problems)
    return {problem.place: problem.message for problem in problems}


def edited(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


def test_each_source_has_its_own_log_and_targets(tmp_path):
    assert read(tmp_path, GOOD) == {}
    found = config.load_engine(tmp_path / "pipeline.yaml")
    eu, us = cast(Any, found.pipelines)
    assert found.has_several
    assert (eu.name, eu.source_name, eu.source.slot, eu.source.publication) == (
        "shop_eu", "eu", "tailrace_shop_eu", "tailrace_shop_eu",
    )  # fmt: skip
    assert (us.source.slot, us.source.publication) == ("mine", "tailrace_shop_us")
    assert eu.log.path == tmp_path / "logs" / "eu"
    assert [(sink.name, sink.path) for sink in us.sinks] == [
        ("delta-lake", tmp_path / "lake" / "us"),
        ("lines", tmp_path / "lines" / "us"),
    ]
    assert config.load(tmp_path / "pipeline.yaml", "us") == us


def test_a_single_source_has_no_source_name_and_the_plain_log_path(tmp_path):
    (tmp_path / "p.yaml").write_text("name: shop\nsource: {host: a}\nlog: {path: ./log}\n")
    found = config.load_engine(tmp_path / "p.yaml")
    (only,) = cast(Any, found.pipelines)
    assert config.load(tmp_path / "p.yaml") == only
    assert (only.source_name, only.source.slot, only.log.path) == ("", "tailrace_shop", tmp_path / "log")
    assert not found.has_several


@pytest.mark.parametrize(("source", "words"), [(None, "eu, us"), ("asia", "eu, us")])
def test_one_of_several_sources_must_be_chosen(tmp_path, source, words):
    read(tmp_path, GOOD)
    with pytest.raises(TailraceError) as caught:
        config.load(tmp_path / "pipeline.yaml", source)
    assert caught.value.kind is Kind.CONFIG_INVALID
    assert words in caught.value.hint


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        (edited("name: us", "name: eu"), "sources[1].name", "is the name of sources[0] too"),
        (edited("name: us", "name: Lock"), "sources[1].name", "must not be lock"),
        (edited("name: us", "name: EU"), "sources[1].name", "only in what a slot's name can't hold"),
        (edited("name: us, ", ""), "sources[1].name", "is required"),
        (edited("name: us", "name: a/b"), "sources[1].name", "letters"),
        (edited("name: us", "name: ../b"), "sources[1].name", "letters"),
        (edited("name: us", "name: a.b"), "sources[1].name", "letters"),
        (edited("name: us", "name: " + "u" * 50), "sources[1].name", "too long"),
        (edited("name: us", "name: [u]"), "sources[1].name", "text"),
        (edited("name: shop", "name: " + "s" * 54), "sources[0].name", "too long"),
        (edited("tables: [sales.*]", "tabels: []"), "sources[1].tabels", "did you mean 'tables'?"),
        (edited("tables: [sales.*]", "tables: [orders]"), "sources[1].tables[0]", "schema.table"),
        (edited("tables: [sales.*]", "password: secret"), "sources[1].password", "reference"),
        (edited("tasks_max: 2", "tasks_max: 0"), "tasks_max", "at least 1"),
        (edited("tasks_max: 2", "task_max: 2"), "task_max", "did you mean 'tasks_max'?"),
        (edited("tasks_max: 2", "source: {host: a}"), "sources", "together with source"),
        ("name: shop\nlog: {path: l}\n", "source", "is required, or sources"),
        ("name: shop\nsources: []\nlog: {path: l}\n", "sources", "at least one"),
        ("name: shop\nsources: {a: 1}\nlog: {path: l}\n", "sources", "list"),
        ("name: shop\nsources: [1]\nlog: {path: l}\n", "sources[0]", "section"),
        (
            edited("dsn: postgresql://cdc@eu.example/shop", "host: us.example, slot: mine"),
            "sources[1].slot",
            "is the slot of sources[0] on the same server",
        ),
    ],
)
def test_a_problem_is_reported_at_its_place(tmp_path, text, place, words):
    found = read(tmp_path, text)
    assert words in found.get(place, ""), found


def test_configuration_from_python_is_checked_like_a_file(tmp_path):
    for sources in ([], [{"name": "a"}, {"name": "A"}]):
        with pytest.raises(ValidationError):
            EngineConfig.model_validate({"name": "x", "sources": sources, "log": {"path": "l"}})


def test_the_part_of_one_source_is_sent_to_executors_as_json():
    found = from_mapping(
        {
            "name": "shop",
            "sources": [
                {"name": "north", "host": "db", "sslcert": "/own.pem"},
                {"name": "south", "host": "db"},
            ],
            "log": {"path": "./log"},
        }
    )
    for part in found.pipelines:
        again = PipelineConfig.model_validate(json.loads(part.model_dump_json(exclude_unset=True)))
        assert again == part
        assert again.source_name == part.source_name
