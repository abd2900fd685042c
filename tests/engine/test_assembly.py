"""How an engine is configured: a file, a mapping, a configuration object, Python objects."""

from __future__ import annotations

from typing import ClassVar

import pytest
import structlog

from tailrace import Callbacks, Engine, config, extensions
from tailrace.converters import JsonConverter
from tailrace.engine.processing import manual
from tailrace.errors import Kind, TailraceError
from tailrace.secrets import masked
from tailrace.testing import LinesSource
from tests.support.engines import Seen, Store
from tests.support.wait import wait_until

FILE = """
name: shop
source:
  type: postgresql
  host: db.example
  password: ${env:PW}
log:
  path: ./log
tasks_max: 3
engine:
  offset_commit: {policy: always}
  transformations:
    - {type: route, regex: "lines(.*)", replacement: "routed$1"}
"""


class Spy(LinesSource):
    """A connector in place of PostgreSQL."""

    made: ClassVar[list] = []

    def __init__(self):
        super().__init__(5, tasks=3)
        Spy.made.append(self)

    def start(self, context):
        super().start(context)
        self.context = context

    def create_task(self):
        task = super().create_task()
        start = task.start

        def started(context):
            self.wanted = context.wanted
            start(context)

        task.start = started  # type: ignore[method-assign]
        return task


@pytest.fixture
def found(monkeypatch):
    """The names of the connectors that were looked up."""
    asked, Spy.made = [], []

    def factory(group, name, methods):
        asked.append((group, name))
        return Spy

    monkeypatch.setattr(extensions, "factory", factory)
    return asked


@pytest.mark.parametrize("kind", ["path", "text", "mapping", "config"])
def test_a_file_configures_everything_and_secrets_stay_references(found, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "shop.yaml"
    file.write_text(FILE)
    given = {
        "path": file,
        "text": str(file),
        "mapping": {
            "name": "shop",
            "source": {"type": "postgresql", "host": "db.example", "password": "${env:PW}"},
            "log": {"path": "./log"},
            "tasks_max": 3,
            "engine": {
                "offset_commit": {"policy": "always"},
                "transformations": [
                    {"type": "route", "regex": "lines(.*)", "replacement": "routed$1"},
                ],
            },
        },
        "config": config.load_engine(file),
    }[kind]
    topics, store = set(), Store()
    Engine(given, on_record=lambda record: topics.add(record.topic), offsets=store).run()
    assert found == [(extensions.CONNECTORS, "postgresql")]
    context = Spy.made[0].context
    assert context.name == "shop"
    assert context.settings["source"]["password"] == "${env:PW}"
    assert context.settings["log"] == {"path": str(tmp_path / "log")}
    assert "engine" not in context.settings
    assert topics == {"routed.0-0", "routed.1-0", "routed.2-0"}
    assert store.line() == 5


def test_arguments_override_the_file(found, tmp_path):
    file = tmp_path / "shop.yaml"
    file.write_text(FILE)
    source, store = LinesSource(5), Store()
    engine = Engine(
        file,
        name="other",
        connector=source,
        settings={"mine": 1},
        options={"offset_commit": {"policy": "count", "records": 100}},
        on_record=Seen().record,
        offsets=store,
    )
    engine.run()
    assert found == []
    assert engine.view().name == "other"


@pytest.mark.parametrize("kind", [dict, config.EngineOptions.model_validate])
def test_options_not_given_as_arguments_come_from_the_file(found, tmp_path, kind):
    file, offsets = tmp_path / "shop.yaml", "  offset_storage: {type: file, path: ./offsets}\n"
    file.write_text(FILE + offsets)
    chosen = kind({"on_task_failure": "restart", "offset_commit": {"policy": "count", "records": 2}})
    topics = []
    for _ in range(2):
        engine = Engine(file, on_record=lambda record: topics.append(record.topic), options=chosen)
        engine.run()
    assert sorted(topics) == ["routed.0-0"] * 5 + ["routed.1-0"] * 5 + ["routed.2-0"] * 5
    options = engine._parts.options
    assert (options.on_task_failure, options.offset_commit.policy) == ("restart", "count")
    assert Engine(file, on_record=print, options={"transformations": []})._parts.stages.transform is None


@pytest.mark.parametrize("sinks", ["", "sinks:\n  - {type: jsonl, path: ./lake}\n"])
def test_a_file_needs_no_handler_and_its_tasks_know_that_there_is_none(found, tmp_path, sinks):
    file = tmp_path / "shop.yaml"
    file.write_text(FILE + sinks)
    store = Store()
    Engine(file, offsets=store).run()
    assert not Spy.made[-1].wanted
    assert store.line() == 5
    Engine(file, on_record=print, offsets=Store()).run()
    assert Spy.made[-1].wanted


def test_without_a_handler_a_failed_task_is_isolated_by_default(found, tmp_path):
    file = tmp_path / "shop.yaml"
    file.write_text(FILE)
    assert Engine(file)._parts.options.on_task_failure == "isolate"
    assert Engine(file)._parts.options.errors_retries_max == 0
    chosen = Engine(file, options={"on_task_failure": "stop", "errors_retries_max": 3})._parts.options
    assert (chosen.on_task_failure, chosen.errors_retries_max) == ("stop", 3)
    assert Engine(file, on_record=print)._parts.options.on_task_failure == "stop"


def test_a_connector_may_bring_the_offset_store():
    class Keeping(LinesSource):
        def offset_store(self, name, settings):
            self.asked = (name, dict(settings))
            self.store = Store()
            return self.store

    source = Keeping(5)
    Engine(connector=source, name="x", settings={"a": 1}, on_record=Seen().record).run()
    assert source.asked == ("x", {"a": 1})
    assert source.store.line() == 5
    assert source.store.calls == ["start", "stop"]
    source = Keeping(5)
    options = {"offset_storage": {"type": "memory"}}
    Engine(connector=source, on_record=Seen().record, options=options).run()
    assert not hasattr(source, "asked")


def test_offsets_may_be_stored_in_a_file(tmp_path):
    options = {"offset_storage": {"type": "file", "path": str(tmp_path / "offsets")}}
    for expected in (5, 0):
        seen = Seen()
        Engine(connector=LinesSource(5), on_record=seen.record, options=options).run()
        assert seen.count == expected


def test_neither_configuration_nor_connector_is_an_error():
    with pytest.raises(TailraceError, match="neither a configuration nor a connector") as caught:
        Engine(on_record=print)
    assert caught.value.kind is Kind.CONFIG_INVALID
    with pytest.raises(TailraceError, match="name: is required"):
        Engine({"source": {"type": "postgresql"}, "log": {"path": "x"}}, on_record=print)


async def awaited(_):
    pass


def iterated(_):
    yield


async def awaited_and_iterated(_):
    yield


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"config": 5}, "config can't be 5"),
        ({"config": b"shop.yaml"}, "config can't be bytes"),
        ({"options": "order"}, "options can't be str"),
        ({"options": {"offset_commit": {"timeout_ms": 0}}}, "offset_commit.timeout_ms"),
        ({"settings": []}, "settings can't be list"),
        ({"name": ""}, "name can't be str"),
        ({"tasks_max": 0}, "tasks_max can't be 0"),
        ({"tasks_max": -1}, "tasks_max can't be -1"),
        ({"transformations": 5}, "transformations can't be 5"),
        ({"predicates": []}, "predicates can't be list"),
        ({"converter": JsonConverter}, "the class JsonConverter is not a converter"),
        ({"offsets": Store}, "offsets can't be type"),
        ({"commit_policy": object()}, "commit_policy can't be object"),
        ({"clock": 5}, "clock can't be 5"),
        ({"callbacks": print}, "callbacks can't be builtin_function_or_method"),
        ({"callbacks": Callbacks(completed=5)}, "callbacks.completed is called: int can't be"),  # type: ignore[arg-type]
        ({"callbacks": Callbacks(completed=awaited)}, "callbacks.completed is an async function"),  # type: ignore[arg-type]
        ({"processor": awaited, "on_record": None}, "processor is an async function"),
        ({"on_record": awaited_and_iterated}, "on_record is an async generator"),
        ({"on_record": iterated}, "on_record is a generator"),
        ({"on_record": manual(print)}, "which is for handlers of batches"),
        ({"on_record": None, "on_batch": manual(iterated)}, "on_batch is a generator"),  # type: ignore[arg-type]
        ({"on_record": lambda: None}, "on_record can't be called with 1 argument"),
        ({"on_record": None, "on_batch": lambda _, __: None}, "on_batch can't be called with 1 argument"),
        ({"on_record": None, "on_batch": manual(lambda: None)}, "can't be called with 2 arguments"),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_a_wrong_kind_are_refused_at_once(arguments, told):
    with pytest.raises(TailraceError) as caught:
        Engine(**{"connector": LinesSource(), "on_record": print, **arguments})
    assert caught.value.kind is Kind.CONFIG_INVALID
    assert told in caught.value.message
    assert caught.value.hint


def test_a_custom_processor_replaces_handlers():
    class Own:
        seen: ClassVar[list] = []

        def initialize(self, executor, transform, convert, committer):
            self.committer = committer
            assert executor.submit(lambda: 5).result(30) == 5

        def process(self, batch):
            Own.seen.append(len(batch))
            self.committer.mark_processed(batch)
            self.committer.mark_batch_finished(batch)

        def drain(self, timeout_s):
            return True

        def close(self):
            Own.seen.append("closed")

    store = Store()
    options = {"offset_commit": {"policy": "always"}}
    Engine(connector=LinesSource(25), processor=Own, offsets=store, options=options).run()
    assert Own.seen == [10, 10, 5, "closed"]
    assert store.line() == 25


def test_the_status_is_available_at_any_time():
    seen = Seen()
    engine = Engine(connector=LinesSource(5, ends=False), on_record=seen.record, offsets=Store())
    assert engine.status()["state"] == "creating"
    assert engine.status()["tasks"] == []
    with engine:
        wait_until(lambda: engine.view().tasks[0].processed == 5, 60)
        assert engine.status()["tasks"][0]["state"] == "polling"
    assert engine.status()["state"] == "stopped"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (
            {"password": "x", "n": 1, "on": True, "none": None},
            {"password": "***", "n": 1, "on": True, "none": None},
        ),
        ({"SSL_KEY_PASSWORD": 5}, {"SSL_KEY_PASSWORD": "***"}),
        ({"dsn": "postgresql://me:p/w:@x@db/x?a=b"}, {"dsn": "postgresql://me:***@db/x?a=b"}),
        ({"dsn": "host=db password='a b' user=me"}, {"dsn": "host=db password=*** user=me"}),
        ({"url": "https://db.example/x"}, {"url": "https://db.example/x"}),
        ({"token": "${file:/run/t}"}, {"token": "${file:/run/t}"}),
        ({"list": [{"secret": "x"}]}, {"list": [{"secret": "***"}]}),
        (
            {"options": {"sasl.pasword": "x", "sasl.username": "${env:USER}", "n": {"m": 1}}},
            {"options": {"sasl.pasword": "***", "sasl.username": "${env:USER}", "n": {"m": "***"}}},
        ),
        ({"options": "-c work_mem=64MB"}, {"options": "-c work_mem=64MB"}),
    ],
)
def test_settings_are_shown_without_secrets(value, shown):
    assert masked(value) == shown


def test_a_converter_may_be_given_as_a_section():
    seen = []
    engine = Engine(
        connector=LinesSource(3),
        on_record=lambda event: seen.append(event.value),
        converter={"type": "json", "schemas_enable": False},
    )
    engine.run()
    assert len(seen) == 3
    with pytest.raises(TailraceError, match="converter") as raised:
        Engine(connector=LinesSource(), on_record=print, converter={"schemas_enable": False})
    assert raised.value.kind is Kind.CONFIG_INVALID
    assert "type" in raised.value.message


@pytest.mark.parametrize(
    ("storage", "sinks", "handler", "is_said"),
    [
        ("", "", True, True),
        ("{type: memory}", "", True, True),
        ("{type: kafka, bootstrap_servers: 'k:9092'}", "", True, False),
        # With a handler the option concerns the engine's offsets, without one those of the sinks.
        ("", "{type: kafka, bootstrap_servers: 'k:9092'}", True, True),
        ("", "{type: kafka, bootstrap_servers: 'k:9092'}", False, False),
        ("", "{type: jsonl, path: ./lines}", False, True),
    ],
)
def test_atomic_source_offset_commit_without_offsets_in_kafka_is_ignored_with_a_warning(
    found, tmp_path, storage, sinks, handler, is_said
):
    file = tmp_path / "shop.yaml"
    section = f", offset_storage: {storage}" if storage else ""
    file.write_text(
        "name: shop\nsource: {type: postgresql, host: db.example}\nlog: {path: ./log}\n"
        f"engine: {{atomic_source_offset_commit: true{section}}}\nsinks: [{sinks}]\n"
    )
    for wanted in (True, False):
        with structlog.testing.capture_logs() as logs:
            Engine(
                file,
                on_record=Seen().record if handler else None,
                options=None if wanted else {"atomic_source_offset_commit": False},
            )
        said = [entry for entry in logs if "atomic_source_offset_commit is ignored" in entry["event"]]
        assert [entry["log_level"] for entry in said] == ["warning"] * (is_said and wanted)


@pytest.mark.parametrize("order", ["unordered", "key"])
def test_an_order_for_single_records_is_refused_with_a_handler_of_batches(order):
    options = {"record_processing": {"order": order}}
    with pytest.raises(TailraceError, match=f"order: {order} is for handlers of single records") as caught:
        Engine(connector=LinesSource(1), on_batch=print, options=options)
    assert caught.value.kind is Kind.CONFIG_INVALID
