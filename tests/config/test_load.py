"""A file becomes one frozen value, or all of its problems are reported."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tailrace import config
from tailrace.config.document import DOCUMENT_BYTES_MAX
from tailrace.errors import Kind, TailraceError

GOOD = """\
name: shop
source:
  type: postgresql
  dsn: postgresql://cdc@db.example/shop
  password: ${env:PG_PASSWORD}
  tables: ["public.orders", "sales.*"]
log:
  path: ./shop.log
sinks:
  - type: delta
    path: ./lake
    mode: append
"""


def written(directory: Path, text: str | bytes) -> Path:
    file = directory / "pipeline.yaml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


def places(directory: Path, text: str | bytes) -> dict[str, str]:
    found, problems = config.read(written(directory, text))
    assert found is None
    assert problems
    return {problem.place: problem.message for problem in problems}


def edited(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


def test_the_documented_file_loads(tmp_path):
    pipeline: Any = config.load(written(tmp_path, GOOD))
    assert pipeline.name == "shop"
    assert pipeline.source.slot == pipeline.source.publication == "tailrace_shop"
    assert pipeline.source.snapshot == "initial"
    assert pipeline.source.tables == ("public.orders", "sales.*")
    assert [sink.name for sink in pipeline.sinks] == ["delta-lake"]


def test_a_key_is_text_whatever_yaml_makes_of_it(tmp_path):
    rename = "transformations:\n  - {type: rename, fields: {no: number, 2024: year, y: z}}\n"
    found: Any = config.load_engine(written(tmp_path, GOOD + rename))
    assert found.transformations[0].fields == {"no": "number", "2024": "year", "y": "z"}
    for word, is_on in (("on", True), ("off", False), ('"on"', True), ("'off'", False)):
        found = config.load_engine(written(tmp_path, f"{GOOD}realtime: {word}\n"))
        assert found.realtime.enabled is is_on
    assert places(tmp_path, GOOD + "realtime: maybe\n") == {"realtime.enabled": "must be true or false"}
    known = "buffer_bytes, enabled, return_automatically"
    assert places(tmp_path, GOOD + "realtime: {on: true}\n") == {
        "realtime.on": f"unknown key; possible are {known}"
    }


def test_relative_paths_are_relative_to_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    text = edited("  password: ${env:PG_PASSWORD}", "  password: ${file:./pw}\n  sslrootcert: root.pem")
    pipeline: Any = config.load(written(tmp_path, text))
    assert pipeline.log.path == tmp_path / "shop.log"
    assert pipeline.sinks[0].path == tmp_path / "lake"
    assert pipeline.source.sslrootcert == str(tmp_path / "root.pem")
    assert str(pipeline.source.password) == f"${{file:{tmp_path}/pw}}"


def test_a_loaded_pipeline_is_immutable(tmp_path):
    pipeline = config.load(written(tmp_path, GOOD))
    with pytest.raises(ValidationError):
        pipeline.name = "other"


def test_every_problem_is_reported_at_once_with_its_place_and_line(tmp_path):
    text = """\
name: shop
source:
  type: postgresql
  tabels: ["public.orders"]
  tables: [orders]
  port: high
  snapshot: sometimes
  slot: Upper
log:
  path: ./shop.log
  segment_bytes: 12
sinks:
  - {type: delta, path: ./lake, mode: mirrored, moed: x}
  - {type: kafka}
  - {type: detla}
  - {path: ./here}
name: again
"""
    file = written(tmp_path, text)
    found, problems = config.read(file)
    assert found is None
    assert [problem.line for problem in problems] == sorted(problem.line or 0 for problem in problems)
    by_place = {problem.place: (problem.line, problem.message) for problem in problems}
    assert by_place == {
        "source.tabels": (4, "unknown key; did you mean 'tables'?"),
        "source.tables[0]": (
            5,
            "must be of the form schema.table, such as public.orders or sales.*; or /a regular expression/",
        ),
        "source.port": (6, "must be a whole number"),
        "source.snapshot": (7, "must be one of 'initial', 'when_needed', 'never' or 'only'"),
        "source.slot": (8, "must be 1 to 63 of the characters a-z, 0-9 and _"),
        "log.segment_bytes": (11, "must be at least 65536"),
        "sinks[0].mode": (13, "must be one of 'append' or 'mirror'"),
        "sinks[0].moed": (13, "unknown key; did you mean 'mode'?"),
        "sinks[1].bootstrap_servers": (14, "is required"),
        "sinks[2].type": (15, "must be one of delta, parquet, jsonl, kafka, python; did you mean 'delta'?"),
        "sinks[3].type": (16, "is required: one of delta, parquet, jsonl, kafka, python"),
        "name": (17, "is given twice, first in line 1"),
    }
    with pytest.raises(TailraceError) as caught:
        config.load(file)
    assert caught.value.kind is Kind.CONFIG_INVALID
    for problem in problems:
        assert str(problem) in caught.value.message


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("", "", "empty"),
        ("- a\n", "", "must be a mapping"),
        ("a: [1, 2\n", "", "not valid YAML"),
        ("a: &a [*a]\n", "", "too many values"),
        ("a: " + "[" * 5000 + "\n", "", "file"),
        ("a: !!python/object/apply:os.system ['true']\n", "", "not valid YAML"),
        ("--- {}\n--- {}\n", "", "not valid YAML"),
        (b"\xff\xfe\xff", "", ""),
        (b"name: " + b"x" * DOCUMENT_BYTES_MAX, "", "larger"),
        ("{}\n", "name", "is required"),
        (edited("./shop.log", '"s3://bucket/log"'), "log.path", "not a URL"),
        (edited("./shop.log", '"a\\0b"'), "log.path", "NUL"),
        (edited("./shop.log", "${env:HOME}/shop.log"), "log.path", "can't have a reference"),
        (GOOD + "spark: {master: '${env:MASTER}'}\n", "spark.master", "can't have a reference"),
        (edited("./shop.log", "~nobody-of-that-name/log"), "log.path", "home directory"),
        (edited("name: shop", "name: a b"), "name", "letters"),
        (edited("name: shop", "name: 12"), "name", "put it in quotes"),
        (edited("name: shop", "name: 0000-00-00"), "name", "is not a valid timestamp"),
        (edited("name: shop", f"name: {'9' * 5000}"), "name", "is not a valid int"),
        (edited("./lake", "./shop.log/lake"), "sinks[0].path", "overlaps log.path"),
        (edited('["public.orders", "sales.*"]', "[]"), "source.tables", "at least one"),
        (
            edited("    mode: append", "    name: x\n  - {type: jsonl, path: ./b, name: x}"),
            "sinks[1].name",
            "too",
        ),
        (
            edited(
                "    mode: append", "".join(f"  - {{type: kafka, bootstrap_servers: {h}}}\n" for h in "ab")
            ),
            "sinks[2].group",
            "fence each other",
        ),
        (
            edited(
                "    mode: append", "  - {type: kafka, bootstrap_servers: a, options: {transactional.id: x}}"
            ),
            "sinks[1].options",
            "transactional.id can't be set",
        ),
        (GOOD + "spark: {conf: {a: [1]}}\n", "spark.conf.a", "one value"),
        (GOOD + "sparc: {}\n", "sparc", "did you mean 'spark'"),
        (
            edited("  path: ./shop.log", "  path: ./shop.log\n  segment_bytes: 1 GB"),
            "log.segment_bytes",
            "1 MiB",
        ),
        (GOOD + "tasks_max: true\n", "tasks_max", "must be a whole number"),
        (GOOD + "realtime: {buffer_bytes: true}\n", "realtime.buffer_bytes", "must be a whole number"),
        (
            edited("    mode: append", "    mode: append\n    interval_ms: true"),
            "sinks[0].interval_ms",
            "must be a whole number",
        ),
        (
            edited(
                "    mode: append",
                '  - {type: kafka, bootstrap_servers: a, topics: [{tables: ["*.*"], settings: '
                "{max.message.bytes: 1 MB}}]}",
            ),
            "sinks[1].topics[0].settings",
            "max.message.bytes: must be a number of bytes",
        ),
        (edited("@db.example", "@db.example?replication=1"), "source.dsn", "sets replication"),
        (
            edited("postgresql://cdc@db.example/shop", "mysql://cdc@db.example/shop"),
            "source.dsn",
            "not a connection",
        ),
        (edited("cdc@db.example/shop", "x/y?client_encoding=latin1"), "source.dsn", "sets client_encoding"),
        (edited("${env:PG_PASSWORD}", "${vault:x}"), "source.password", "reference"),
        (
            GOOD.partition("source")[0] + "source: {type: kafka-join, registry: {registry_url: [nowhere]}}\n",
            "source.registry.registry_url[0]",
            "of the form http://host:port",
        ),
    ],
)
def test_a_problem_is_reported_at_its_place(tmp_path, text, place, words):
    found = places(tmp_path, text)
    assert place in found
    assert words in found[place]


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ("source: {type: kafka-join, registry: {registry_url: [1]}}", "[0]: must be text: put it in quotes"),
        ("sources: 1", "sources: must be a list"),
        ("sources: []", "sources: must be a list of at least one source"),
    ],
)
def test_a_list_that_is_wrong_has_one_problem(tmp_path, section, problem):
    _, found = config.read(written(tmp_path, f"name: a\nlog: {{path: l}}\n{section}\n"))
    (words,) = [f"{one.place}: {one.message}" for one in found if one.message != "is required"]
    assert words.endswith(problem)


def test_a_path_that_libraries_would_encode_differently_is_refused(tmp_path, monkeypatch):
    (tmp_path / "\udcff").mkdir()  # a byte that is not UTF-8
    assert "not UTF-8" in places(tmp_path / "\udcff", GOOD)["log.path"]
    assert config.load(written(tmp_path, edited("./shop.log", "./ü"))).log.path == tmp_path / "ü"
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "iso8859-1")
    assert "encoding iso8859-1: set PYTHONUTF8=1" in places(tmp_path, edited("./shop.log", "./ü"))["log.path"]
    config.load(written(tmp_path, GOOD))


def test_a_missing_file_is_a_problem_without_a_traceback(tmp_path):
    with pytest.raises(TailraceError) as caught:
        config.load(tmp_path / "none.yaml")
    assert caught.value.kind is Kind.CONFIG_INVALID
    assert "No such file" in caught.value.message


def test_sizes_may_be_written_with_a_unit(tmp_path):
    pipeline = config.load(written(tmp_path, edited("./shop.log", "./shop.log\n  segment_bytes: 2 MiB")))
    assert pipeline.log.segment_bytes == 2 * 1024 * 1024


def test_sinks_without_a_name_are_named_after_type_and_path(tmp_path):
    text = GOOD + "  - {type: parquet, path: ./a/lake}\n  - {type: parquet, path: ./b/lake}\n"
    names = [sink.name for sink in config.load(written(tmp_path, text)).sinks]
    assert names == ["delta-lake", "parquet-lake", "parquet-lake-2"]


@pytest.mark.parametrize(
    ("pattern", "schema", "table", "fits"),
    [
        ("public.orders", "public", "orders", True),
        ("public.orders", "public", "orders2", False),
        ("public.*", "public", "a.b", True),
        ("*.orders", "sales", "orders", True),
        ("sales.or*rs", "sales", "orders", True),
        ('"a.b".c', "a.b", "c", True),
        ('public."x*"', "public", "xy", False),
        ('public."x*"', "public", "x*", True),
        ('public."say ""hi"""', "public", 'say "hi"', True),
        ("Public.Orders", "public", "orders", False),
        ("public.[ab]", "public", "a", False),
        ("/public[.]order_[0-9]+/", "public", "order_12", True),
        ("/public[.]order_[0-9]+/", "public", "order_x", False),
        ("/public[.]order/", "public", "orders", False),
        ("/(sales|hr)[.].*/", "hr", "a\nb", True),
        ('"/a".b', "/a", "b", True),
        ("public.ünï*", "public", "ünïcode", True),
        ("public.a*b*a", "public", "abba", True),
        ("public.a*a", "public", "a", False),
        ("public.*ab*ab*", "public", "abab", True),
        ("public.*ab*ab*", "public", "aba", False),
        ("public." + 15 * "*a" + "*b", "public", 60 * "a", False),  # in less than a century
    ],
)
def test_patterns_match_tables(pattern, schema, table, fits):
    assert config.matches(pattern, schema, table) is fits


@pytest.mark.parametrize(
    ("pattern", "names", "fits"),
    [
        ("public.users.email", ("public", "users", "email"), True),
        ("public.users.email", ("public", "users", "email2"), False),
        ("*.*.email", ("sales", "people.old", "email"), True),
        ("public.*", ("public", "users", "email"), False),
        ('public."a.b"."c.d"', ("public", "a.b", "c.d"), True),
        ("public.users.*_at", ("public", "users", "created_at"), True),
        ("/.*[.]ssn/", ("hr", "people", "ssn"), True),
    ],
)
def test_patterns_match_columns(pattern, names, fits):
    assert config.matches_column(pattern, *names) is fits


def test_patterns_that_name_one_table_are_recognised():
    exact = ["public.orders", 'public."a*b"', '"*"."*"']
    assert [pattern for pattern in (*exact, "public.*", "*.a", "/public.a/") if config.is_exact(pattern)] == (
        exact
    )


def test_excluded_tables_are_not_captured():
    source = config.PostgresSource(tables=("public.*",), tables_exclude=("/.*_tmp/", "public.log"))
    named = [name for name in ("a", "a_tmp", "log", "logs") if source.captures("public", name)]
    assert named == ["a", "logs"]


def with_sinks(sinks: str) -> str:
    return GOOD[: GOOD.index("sinks:")] + sinks


def refused(directory: Path, text: str) -> list[str]:
    _, problems = config.read(written(directory, text))
    assert problems
    lines = text.splitlines()
    for problem in problems:
        assert problem.line, problem
        assert "type:" in lines[problem.line - 1], (problem, lines[problem.line - 1])
    return [str(problem) for problem in problems]


def test_transformations_of_the_file_run_before_those_of_a_sink(tmp_path):
    text = with_sinks(
        "predicates: {of_orders: {type: table, tables: [public.orders]}}\n"
        "transformations:\n  - {type: rename, fields: {a: b}, predicate: of_orders}\n"
        "sinks:\n"
        "  - {type: jsonl, path: ./lines}\n"
        "  - type: kafka\n    bootstrap_servers: localhost:9092\n    topic_prefix: shop\n"
        "    transformations:\n      - {type: flatten, predicate: deletes}\n"
        "    predicates: {deletes: {type: operation, operations: [delete]}}\n"
    )
    pipeline = config.load(written(tmp_path, text))
    lines, kafka = pipeline.sinks
    assert [step.type for step in lines.transformations] == ["rename"]
    assert [step.type for step in kafka.transformations] == ["rename", "flatten"]
    assert sorted(lines.predicates) == ["of_orders"]
    assert sorted(kafka.predicates) == ["deletes", "of_orders"]


def test_a_sink_uses_predicates_of_a_file_that_has_no_transformations(tmp_path):
    text = with_sinks(
        "predicates: {of_orders: {type: table, tables: [public.orders]}}\n"
        "sinks:\n  - type: jsonl\n    path: ./lines\n"
        "    transformations:\n      - {type: rename, fields: {a: b}, predicate: of_orders}\n"
    )
    (lines,) = config.load(written(tmp_path, text)).sinks
    assert sorted(lines.predicates) == ["of_orders"]


@pytest.mark.parametrize(
    "step",
    [
        "{type: flatten}",
        "{type: drop_headers, headers: [a]}",
        "{type: value_to_key, fields: [a]}",
        "{type: rename, fields: {a: b}, apply_to: key}",
        "{type: route, regex: 'a', replacement: b, key_field: c}",
        "{type: add_fields, metadata: {a: unchanged}}",
        "{type: drop, predicate: tombs}",
        "{type: filter, where: headers.a is null}",
    ],
)
def test_transformations_that_cannot_apply_to_tables_are_refused_with_their_line(step, tmp_path):
    own = with_sinks(
        "predicates: {tombs: {type: tombstone}}\n"
        f"sinks:\n  - type: jsonl\n    path: ./lines\n    transformations:\n      - {step}\n"
    )
    (found,) = refused(tmp_path, own)
    assert "can't be done to a table" in found
    shared = with_sinks(
        f"predicates: {{tombs: {{type: tombstone}}}}\ntransformations:\n  - {step}\n"
        "sinks:\n  - {type: jsonl, path: ./lines}\n"
    )
    (found,) = refused(tmp_path, shared)
    assert "for the sink 'jsonl-lines'" in found
    assert "each in its own list" in found
    config.load(written(tmp_path, shared.replace("jsonl, path: ./lines", KAFKA)))


KAFKA = "kafka, bootstrap_servers: 'localhost:9092', topic_prefix: shop"


@pytest.mark.parametrize(
    "step",
    [
        "{type: filter, where: after.a > 1}",
        "{type: route, regex: a, replacement: b}",
        "{type: rename, fields: {a: b}, predicate: deletes}",
        "{type: add_fields, computed: {a: before.b}}",
    ],
)
def test_transformations_that_cannot_apply_to_a_mirror_are_refused_for_it_only(step, tmp_path):
    text = with_sinks(
        "predicates: {deletes: {type: operation, operations: [delete]}}\n"
        f"sinks:\n  - type: delta\n    path: ./lake\n    mode: mirror\n    transformations:\n      - {step}\n"
    )
    (found,) = refused(tmp_path, text)
    assert "can't be done to a mirror" in found
    config.load(written(tmp_path, text.replace("mirror", "append")))


def test_missing_or_repeated_predicates_of_sinks_are_refused(tmp_path):
    text = with_sinks(
        "predicates: {one: {type: tombstone}}\n"
        "sinks:\n  - type: jsonl\n    path: ./lines\n    predicates: {one: {type: table, tables: [a.b]}}\n"
        "    transformations: [{type: drop, predicate: two}]\n"
    )
    found = places(tmp_path, text)
    assert (
        "is no name in its predicates or those of the file" in found["sinks[0].transformations[0].predicate"]
    )
    assert "is the name of a predicate of the file too" in found["sinks[0].predicates.one"]


IN_KAFKA = "{type: kafka, bootstrap_servers: 'k:9092', group: %s}"


@pytest.mark.parametrize(
    ("sinks", "place"),
    [
        (["{type: python, handler: 'a:take'}", "{type: python, handler: 'b:take'}"], "sinks[1].name"),
        ([IN_KAFKA % "x", "{type: jsonl, path: out}", IN_KAFKA % "y"], "sinks[2].name"),
        (
            ["{type: python, handler: 'a:take'}", "{type: python, handler: 'b:x', name: python-take}"],
            "sinks[0].name",
        ),
        # a sink that writes a folder keeps its position there
        (["{type: jsonl, path: a/out}", "{type: jsonl, path: b/out}"], ""),
        (["{type: python, handler: 'a:take'}", "{type: python, handler: 'b:take', name: b}"], ""),
    ],
)
def test_several_sinks_whose_positions_are_kept_by_name_need_explicit_names(tmp_path, sinks, place):
    text = "name: shop\nsource: {host: h}\nlog: {path: l}\nsinks:\n"
    text += "".join(f"  - {sink}\n" for sink in sinks)
    if not place:
        assert config.load(written(tmp_path, text)).sinks
        return
    [(found, message)] = places(tmp_path, text).items()
    assert found == place
    assert "python-take-2" in message or "kafka-topics-2" in message
