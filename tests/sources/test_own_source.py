"""A type of source of a user's package, with several shards, into every target."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tailrace import Engine
from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.writer import LogWriter
from tailrace.config import PostgresSource, load_engine
from tailrace.config.load import from_mapping
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline.background import as_failure
from tailrace.pipeline.connector import PipelineConnector
from tailrace.pipeline.run import Run
from tailrace.protocol.metadata_frames import shard_states
from tailrace.sources.registry import source_type
from tailrace.testing import source_types
from tailrace.testing.conformance import check_source
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.kafka.reading import read_topic
from tests.support.postgres import Database
from tests.support.sources.text_shards import TextShards, TextShardsCapture, TextShardsSection

TIMEOUT_S = 240
SHARDS = ("a", "b", "c")
KILLS = (
    "capture.before_append=kill@3",
    "capture.after_append=kill@3",
    "log.before_fsync=kill@3",
    "log.after_fsync=kill@3",
    "sink.before_commit=kill@2",
    "kafka.before_commit=kill",
)
COLUMNS = [["id", "int8"], ["shard", "text"], ["what", "text"]]

HANDLER = """
import json
def handle(records):
    with open({path!r}, "a") as file:
        for record in records:
            file.write(json.dumps([record.op, record.after or record.before]) + "\\n")
"""


class OfOtherSettings(TextShards):
    """A type of source whose settings are no section of a source."""

    settings = Path  # type: ignore[assignment]


class World:
    """The shards, the present rows of their tables, and the number of changes of each kind."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        print("seed", seed)  # noqa: T201 - a failure shows it
        self._random = random.Random(seed)
        self.rows: dict[int, list[str]] = {1: ["1", "a", "there before"]}
        self.changes: Counter[str] = Counter({"r": 1})
        self._next = 2
        folder.mkdir()
        table = {"relation": 7, "name": "orders", "columns": COLUMNS, "key": ["id"]}
        table["rows"] = list(self.rows.values())
        (folder / "tables.json").write_text(json.dumps({"orders": table}))
        for shard in SHARDS:
            (folder / f"{shard}.jsonl").touch()

    def work(self, transactions: int) -> None:
        """Commit some transactions, each on one shard."""
        for _ in range(transactions):
            shard = self._random.choice(SHARDS)
            changes = [self._change(shard) for _ in range(self._random.randint(1, 4))]
            with (self.folder / f"{shard}.jsonl").open("a") as file:
                file.write(json.dumps({"time_us": 1_700_000_000_000_000, "changes": changes}) + "\n")

    def _change(self, shard: str) -> list[Any]:
        own = [key for key, row in self.rows.items() if row[1] == shard]
        kind = self._random.choice(["insert", "insert", "update", "delete"]) if own else "insert"
        if kind == "insert":
            row = [str(self._next), shard, f"tab\t{self._next}"]
            self.rows[self._next] = row
            self._next += 1
            self.changes["c"] += 1
            return ["insert", "orders", row]
        key = self._random.choice(own)
        if kind == "update":
            self.rows[key] = [str(key), shard, f"changed {self._random.random()}"]
            self.changes["u"] += 1
            return ["update", "orders", self.rows[key]]
        self.changes["d"] += 1
        return ["delete", "orders", self.rows.pop(key)]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that registers the type of source."""
    info = tmp_path / "package" / "text_shards-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: text-shards\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[tailrace.sources]\n"
        "text_shards = tests.support.sources.text_shards:TextShards\n"
        "a_function = tests.support.sources.text_shards:_lines\n"
        "without_settings = tests.support.sources.text_shards:TextShardsCheck\n"
        "of_other_settings = tests.sources.test_own_source:OfOtherSettings\n"
    )
    monkeypatch.syspath_prepend(str(info.parent))
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (info.parent, root, root / "src"))))
    return info.parent


def _file(at: Path, sinks: str = "", **settings: object) -> Path:
    section = {"type": "text_shards", "folder": str(at / "shards"), "shards": list(SHARDS), **settings}
    file = at / "pipeline.yaml"
    rest = f"log: {{path: ./log}}\nspark: {{start: when_needed}}\nsinks:\n{sinks}"
    file.write_text(f"name: shop\nsource: {json.dumps(section)}\n{rest}")
    return file


def _tailrace(*arguments: object, failpoints: str = "", status: int | None = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tailrace", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env={**os.environ, "TAILRACE_FAILPOINTS": failpoints},
    )
    assert status is None or done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def _mirrored(at: Path) -> dict[int, list[str]]:
    rows = DeltaTable(str(at / "mirror" / "public.orders")).to_pyarrow_table().to_pylist()
    return {row["id"]: [str(row["id"]), row["shard"], row["what"]] for row in rows}


@pytest.mark.usefixtures("package")
@pytest.mark.ci
def test_every_target_has_each_change_once_after_kills_anywhere(
    tmp_path: Path, kafka: EmbeddedKafka, topic_name: str
) -> None:
    world = World(tmp_path / "shards", random.randrange(1 << 32))
    (tmp_path / "own_handler.py").write_text(HANDLER.format(path=str(tmp_path / "handled")))
    file = _file(
        tmp_path,
        "  - {type: jsonl, path: ./lines}\n"
        "  - {type: parquet, path: ./parquet}\n"
        "  - {type: delta, path: ./append}\n"
        "  - {type: delta, path: ./mirror, mode: mirror}\n"
        "  - {type: python, handler: 'own_handler:handle'}\n"
        f"  - {{type: kafka, bootstrap_servers: '{kafka.bootstrap}', topic_prefix: {topic_name},\n"
        f"     group: {topic_name}, offsets_topic: {topic_name}-offsets}}\n",
    )
    assert "ready" in _tailrace("check", file)
    for kill in KILLS:
        world.work(12)
        _tailrace("run", file, "--until-caught-up", failpoints=kill, status=None)
    world.work(5)
    _tailrace("run", file, "--until-caught-up")

    lines = [
        json.loads(line)
        for path in sorted((tmp_path / "lines" / "public.orders").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    assert Counter(line["op"] for line in lines) == world.changes
    assert {line["source"]["connector"] for line in lines} == {"text_shards"}
    assert _mirrored(tmp_path) == world.rows
    appended = DeltaTable(str(tmp_path / "append" / "public.orders")).to_pyarrow_table()
    assert Counter(appended["_op"].to_pylist()) == world.changes
    sent = read_topic(kafka.bootstrap, f"{topic_name}.public.orders")
    assert Counter(each.document["op"] for each in sent if each.document) == world.changes
    handled = [json.loads(line) for line in (tmp_path / "handled").read_text().splitlines()]
    assert set(Counter(op for op, _ in handled)) == set(world.changes)
    status = json.loads(_tailrace("status", file, "--json"))
    assert status["tasks"][0]["source_lag_bytes"] == 0
    assert "sound" in _tailrace("log", "verify", tmp_path / "log")
    with pytest.raises(TailraceError) as refused:
        LogDirectory.open(tmp_path / "lines")
    assert refused.value.kind in (Kind.LOG_MISSING, Kind.LOG_FOREIGN)


@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_the_log_has_the_position_of_each_shard(tmp_path: Path) -> None:
    world = World(tmp_path / "shards", 7)
    world.work(9)
    file = _file(tmp_path, "  - {type: jsonl, path: ./lines}\n")
    _tailrace("run", file, "--until-caught-up")
    writer = LogWriter.open(LogDirectory.open(tmp_path / "log"), "0")
    states = shard_states(writer.schema_in_force)
    writer.close()
    written = {shard: (world.folder / f"{shard}.jsonl").read_text().count("\n") for shard in SHARDS}
    assert {shard: state["lines"] for shard, state in states.items()} == {
        shard: lines for shard, lines in written.items() if lines
    }


def test_the_contract_of_sources_is_kept(tmp_path: Path) -> None:
    world = World(tmp_path / "shards", 10)

    def commit() -> int:
        before = world.changes.total()
        world.work(1)
        return world.changes.total() - before

    section = TextShardsSection(folder=world.folder, shards=SHARDS)
    check_source(TextShards(), section, tmp_path / "log", commit)


def test_postgresql_keeps_the_contract_of_sources(tmp_path: Path, pg: Database) -> None:
    pg.execute("create table orders (id serial primary key)")

    def commit() -> int:
        pg.execute("insert into orders default values")
        return 1

    section = PostgresSource(dsn=pg.dsn).for_pipeline("conformance")
    check_source(source_type("postgresql"), section, tmp_path / "log", commit)


def _takes_all_again(capture: TextShardsCapture) -> None:
    capture.forgets = True


def _takes_nothing(capture: TextShardsCapture) -> None:
    capture.stop()
    capture.caught_up = lambda position: position >= 0  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("after_a_restart", "rule"),
    [(_takes_all_again, "is not captured again"), (_takes_nothing, "no change is missing")],
)
def test_a_source_that_breaks_its_contract_is_found(tmp_path: Path, after_a_restart, rule: str) -> None:
    world = World(tmp_path / "shards", 11)

    class Faulty(TextShards):
        def capture(self, section: Any, log, options, **more):
            made = super().capture(section, log, options, **more)
            if log.exists():
                after_a_restart(made)
            return made

    def commit() -> int:
        before = world.changes.total()
        world.work(1)
        return world.changes.total() - before

    section = TextShardsSection(folder=world.folder, shards=SHARDS)
    with pytest.raises(AssertionError, match=rule):
        check_source(Faulty(), section, tmp_path / "log", commit)


def test_a_capture_that_fails_ends_the_check_of_its_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    World(tmp_path / "shards", 12)
    section = TextShardsSection(folder=tmp_path / "shards", shards=SHARDS)
    monkeypatch.setattr(TextShardsCapture, "_snapshot", lambda _: 1 / 0)
    began_s = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        check_source(TextShards(), section, tmp_path / "log", lambda: 1)
    assert time.monotonic() - began_s < source_types.WAIT_S / 2


@pytest.mark.usefixtures("package")
def test_an_unexpected_error_of_a_capture_names_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    World(tmp_path / "shards", 14)
    monkeypatch.setattr(TextShardsCapture, "_snapshot", lambda _: 1 / 0)
    pipeline = load_engine(_file(tmp_path, "  - {type: jsonl, path: ./lines}\n"))
    with pytest.raises(TailraceError, match="package 'tests': ZeroDivisionError was raised") as caught:
        Run(pipeline, until_caught_up=True).run()
    assert caught.value.kind is Kind.TASK_FAILED
    assert "see that package" in caught.value.hint
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("method", ["capture", "snapshots"])
def test_an_unexpected_error_of_any_method_names_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    World(tmp_path / "shards", 16)
    monkeypatch.setattr(TextShards, method, lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        Run(load_engine(_file(tmp_path, "  - {type: jsonl, path: ./lines}\n"))).run()
    failure = as_failure(caught.value)  # as commands print it
    assert failure.kind is Kind.TASK_FAILED
    assert "the package 'tests': ZeroDivisionError was raised" in failure.message
    monkeypatch.setattr(TextShards, method, lambda *_, **__: (tmp_path / "absent").read_text())
    with pytest.raises(FileNotFoundError) as missing:
        Run(load_engine(_file(tmp_path, "  - {type: jsonl, path: ./lines}\n"))).run()
    assert as_failure(missing.value, Kind.ENVIRONMENT_UNFIT).kind is Kind.SOURCE_UNREACHABLE
    monkeypatch.undo()
    assert as_failure(caught.value).kind is Kind.INTERNAL  # the package is not installed


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("broken", "method", "message"),
    [
        (TextShards, "end", "ask the source 'text_shards' for its end: it returned NoneType, not a position"),
        (TextShardsCapture, "caught_up", "package 'tests': ZeroDivisionError was raised"),
    ],
)
def test_a_source_that_cannot_say_where_it_ends_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: type, method: str, message: str
) -> None:
    World(tmp_path / "shards", 15)
    monkeypatch.setattr(broken, method, lambda *_: None if method == "end" else 1 / 0)
    pipeline = load_engine(_file(tmp_path, "  - {type: jsonl, path: ./lines}\n"))
    with pytest.raises(TailraceError, match=message) as caught:
        Run(pipeline, until_caught_up=True).run()
    assert caught.value.kind is Kind.TASK_FAILED


@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_masks_apply_to_sinks_handlers_and_readers_that_know_only_the_logs_path(tmp_path: Path) -> None:
    World(tmp_path / "shards", 13)
    masks = [{"columns": ["public.orders.what"], "method": "fixed"}]
    file = _file(tmp_path, "  - {type: jsonl, path: ./lines}\n", masks=masks)
    file.write_text(file.read_text().replace("name: shop", "name: my-shop"))
    _tailrace("run", file, "--until-caught-up")
    [lines] = (tmp_path / "lines" / "public.orders").glob("*.jsonl")
    assert json.loads(lines.read_text())["after"] == {"id": 1, "shard": "a", "what": "****"}
    assert _tailrace("log", "show", tmp_path / "log", "--json") == lines.read_text()

    file.write_text(file.read_text().replace("path: ./log", "path: ./other").partition("sinks:")[0])
    seen: list[Any] = []
    engine = Engine(
        name="own",
        connector=PipelineConnector(),
        settings=load_engine(file).as_settings() | {"until_caught_up": True},
        on_record=lambda record: seen.append(record.after["what"]),
    )
    engine.run()
    assert seen == ["****"]


@pytest.mark.usefixtures("package")
@pytest.mark.slow
def test_a_handler_gets_the_records_of_an_engine(tmp_path: Path) -> None:
    world = World(tmp_path / "shards", 8)
    world.work(20)
    file = _file(tmp_path)
    file.write_text(file.read_text().replace("sinks:\n", ""))
    settings = load_engine(file).as_settings() | {"until_caught_up": True}
    seen: Counter[str] = Counter()
    engine = Engine(
        name="own",
        connector=PipelineConnector(),
        settings=settings,
        on_record=lambda record: seen.update(record.op),
    )
    engine.run()
    assert seen == world.changes


@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_problems_of_its_section_are_reported_at_their_place(tmp_path: Path) -> None:
    World(tmp_path / "shards", 9)
    file = _file(tmp_path, "  - {type: jsonl, path: ./lines}\n", shards=[], colour="red")
    said = _tailrace("check", file, status=2)
    assert "source.shards" in said
    assert "source.colour" in said
    file = _file(tmp_path, "  - {type: jsonl, path: ./lines}\n", shards=["a", "nowhere"])
    assert "the shard 'nowhere' is not there" in _tailrace("check", file, status=None)
    file = _file(tmp_path, "  - {type: jsonl, path: ./lines}\n", shards=["nowhere"], folder="shards")
    assert "the shard 'nowhere' is not there" in _tailrace("check", file, status=None)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a_function", "names no class whose `settings` is a subclass of"),
        ("of_other_settings", "names no class whose `settings` is a subclass of"),
        ("without_settings", "it has no settings"),
        ("text_shard", "source.type: must be one of 'postgresql', "),
    ],
)
def test_what_is_no_type_of_source_is_refused(name: str, words: str) -> None:
    source = {"type": name, "folder": "shards"}
    with pytest.raises(TailraceError) as refused:
        from_mapping({"name": "shop", "source": source, "log": {"path": "log"}})
    assert refused.value.kind is Kind.CONFIG_INVALID
    assert words in str(refused.value)
    assert "source.folder" not in str(refused.value)


@pytest.mark.slow
def test_the_pages_code_for_writing_a_log_works(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "own-sources.md").read_text()
    ((code, *_),) = re.findall(r"```python\n((.|\n)*?)```", page)
    given: dict[str, Any] = {"log": tmp_path / "log", "listener": None, "position": 5, "commit_time_us": 1}
    exec(code, given)  # noqa: S102 - of our own page
    given["writer"].close()
    shown = subprocess.run(
        [sys.executable, "-m", "tailrace", "log", "show", str(tmp_path / "log"), "--json"],
        capture_output=True, text=True, check=True, timeout=TIMEOUT_S,
    ).stdout  # fmt: skip
    assert json.loads(shown)["after"] == {"id": 1, "what": "a book"}
