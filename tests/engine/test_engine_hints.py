"""Follows the hints of errors of engines and converters: the missing records come then."""

from __future__ import annotations

import http.client
import re
import traceback
from typing import Any

import pytest

from tailrace import Engine
from tailrace.errors import Kind, TailraceError
from tailrace.records.batch import Batch
from tailrace.records.making import SourceRecord
from tailrace.records.record import Record
from tailrace.testing import Fault, LinesSource
from tests.support.converters.avro import decoded
from tests.support.converters.registry import FakeRegistry
from tests.support.converters.registry import Fault as RegistryFault
from tests.support.engines import Seen, Store

NUMBERS = list(range(1, 11))


def refused(kind: Kind, engine: Engine) -> TailraceError:
    """Run an engine, and return the error that stops it."""
    with pytest.raises(TailraceError) as raised:
        engine.run()
    assert raised.value.kind is kind, raised.value
    return raised.value


# ---------------------------------------------------------------------- calls and timeouts


@pytest.mark.follows("engine_misused")
def test_another_engine_runs_after_one_that_has_ended() -> None:
    seen, source, store = Seen(), LinesSource(10), Store()

    def create() -> Engine:
        return Engine(connector=source, on_record=seen.record, offsets=store)

    ended = create()
    ended.run()
    source.append(5)
    error = refused(Kind.ENGINE_MISUSED, ended)
    assert error.hint == "an engine runs once: create another one to run again"
    create().run()
    assert seen.lines["0-0"] == list(range(1, 16))


@pytest.mark.follows("task_timed_out")
@pytest.mark.slow
def test_a_task_that_starts_slowly_gets_a_longer_timeout() -> None:
    seen = Seen()

    def create(**options: Any) -> Engine:
        slow = LinesSource(10, faults=[Fault("start", delay_s=1.0)])
        return Engine(connector=slow, on_record=seen.record, options=options)

    error = refused(Kind.TASK_TIMED_OUT, create(task_management_timeout_ms=100))
    found = re.search(r"(\w+) is the limit", error.hint)
    assert found is not None
    create(**{found[1]: 60_000}).run()
    assert seen.lines["0-0"] == NUMBERS


# ---------------------------------------------------------------------- what a task returns


class Orders(LinesSource):
    """A connector whose task passes each batch of lines through a function."""

    def __init__(self, make: Any) -> None:
        super().__init__(10)
        self._make = make

    def create_task(self) -> Any:
        task = super().create_task()
        poll = task.poll

        def made(timeout_s: float) -> Any:
            batch = poll(timeout_s)
            return None if batch is None else self._make([record.after["number"] for record in batch])

        task.poll = made  # type: ignore[method-assign]
        return task


def record_of(number: int, value: Any, topic: str = "orders") -> SourceRecord:
    return SourceRecord(topic=topic, offset={"line": number}, value=value)


def batch_of(records: list[SourceRecord]) -> Batch:
    return Batch.of_records(records, partition={"partition": "0-0"})


@pytest.mark.follows("record_invalid")
def test_records_returned_by_a_poll_are_put_into_a_batch() -> None:
    got: list[Any] = []

    def run(make: Any) -> Engine:
        return Engine(connector=Orders(make), on_record=lambda record: got.append(record.value))

    def records(numbers: list[int]) -> list[SourceRecord]:
        return [record_of(number, {"number": number}) for number in numbers]

    error = refused(Kind.RECORD_INVALID, run(records))
    found = re.search(r"tailrace\.records\.batch\.Batch \(Batch\.(\w+) makes one\)", error.hint)
    assert found is not None
    made = getattr(Batch, found[1])
    run(lambda numbers: made(records(numbers), partition={"partition": "0-0"})).run()
    assert [value["number"] for value in got] == NUMBERS


@pytest.mark.follows("record_invalid")
@pytest.mark.parametrize("way", ["another topic", "converted"])
def test_values_of_two_types_are_sent_to_two_topics_or_converted(way: str) -> None:
    got: list[Any] = []

    def engine(make: Any) -> Engine:
        return Engine(connector=Orders(make), on_record=lambda record: got.append(record.value))

    def mixed(number: int) -> Any:
        return number if number % 2 else str(number)

    error = refused(
        Kind.RECORD_INVALID, engine(lambda numbers: batch_of([record_of(n, mixed(n)) for n in numbers]))
    )
    assert "use another topic, or convert them in the task" in error.hint
    if way == "converted":
        engine(lambda numbers: batch_of([record_of(n, str(mixed(n))) for n in numbers])).run()
    else:
        topics = ["texts", "numbers"]
        engine(lambda numbers: batch_of([record_of(n, mixed(n), topics[n % 2]) for n in numbers])).run()
    assert sorted(int(value) for value in got) == NUMBERS


# ---------------------------------------------------------------------- converters


def converted(converter: Any, *steps: Any) -> tuple[Engine, list[Any]]:
    """Return an engine over lines with a converter and transformations, and the list that gets its events."""
    got: list[Any] = []
    options = {"converter": converter, "transformations": list(steps)}
    return Engine(connector=LinesSource(10), on_record=got.append, options=options), got


def avro(registry: FakeRegistry, **more: Any) -> dict[str, Any]:
    return {"type": "avro", "registry_url": registry.url, **more}


def numbers_in(registry: FakeRegistry, got: list[Any]) -> list[int]:
    """Return the numbers of the lines in Avro events, decoded with the registry's schemas."""
    found = []
    for event in got:
        schema = registry.schema(int.from_bytes(event.value[1:5], "big"))
        found.append(int(decoded(event.value, schema)["after"]["number"]))
    return found


@pytest.mark.follows("conversion_failed")
def test_a_subject_that_no_record_can_name_is_named_by_the_topic() -> None:
    with FakeRegistry() as registry:

        def engine(**more: Any) -> Engine:
            def texts(numbers: list[int]) -> Batch:
                return batch_of([record_of(number, f"text {number}") for number in numbers])

            options = {"converter": avro(registry, **more)}
            return Engine(connector=Orders(texts), on_record=got.append, options=options)

        got: list[Any] = []
        error = refused(Kind.CONVERSION_FAILED, engine(value_subject="record"))
        found = re.search(r"choose (\w+): (\w+) for such records", error.hint)
        assert found is not None
        engine(**{found[1]: found[2]}).run()
        assert len(got) == 10
        assert list(registry.subjects) == ["orders-value"]


@pytest.mark.follows("registry_refused")
@pytest.mark.parametrize("way", ["password", "token"])
def test_right_credentials_are_accepted_by_the_registry(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIGHT", "r1ght")
    monkeypatch.setenv("WRONG", "wr0ng")
    registry = FakeRegistry(token="r1ght") if way == "token" else FakeRegistry(username="u", password="r1ght")
    with registry:
        more = {} if way == "token" else {"registry_username": "u"}
        engine, _ = converted(avro(registry, **more, **{f"registry_{way}": "${env:WRONG}"}))
        assert f"registry_{way}" in refused(Kind.REGISTRY_REFUSED, engine).hint
        engine, got = converted(avro(registry, **more, **{f"registry_{way}": "${env:RIGHT}"}))
        engine.run()
        assert numbers_in(registry, got) == NUMBERS


@pytest.mark.follows("registry_unreachable")
@pytest.mark.slow
def test_the_engine_goes_on_once_the_registry_runs_again() -> None:
    with FakeRegistry(faults=[RegistryFault(503, times=1_000_000)]) as registry:
        got: list[Any] = []
        options = {"converter": avro(registry), "errors_retries_max": 0}
        engine = Engine(connector=LinesSource(10), on_record=got.append, options=options)
        assert "see whether it runs and can be reached" in refused(Kind.REGISTRY_UNREACHABLE, engine).hint
        registry.faults = []
        engine, got = converted(avro(registry))
        engine.run()
        assert numbers_in(registry, got) == NUMBERS


@pytest.mark.follows("registry_refused")
@pytest.mark.slow
def test_the_address_of_a_registry_without_tls_is_corrected() -> None:
    with FakeRegistry() as registry:
        url = registry.url
        engine, _ = converted(avro(registry) | {"registry_url": url.replace("http:", "https:")})
        assert "http:// without TLS" in refused(Kind.REGISTRY_REFUSED, engine).hint
        engine, got = converted(avro(registry))
        engine.run()
        assert numbers_in(registry, got) == NUMBERS


@pytest.mark.follows("schema_refused")
@pytest.mark.parametrize("way", ["registered first", "registered by the converter"])
def test_a_missing_schema_is_registered(way: str) -> None:
    with FakeRegistry() as registry:
        strict = avro(registry, auto_register_schemas=False)
        engine, _ = converted(strict)
        hint = refused(Kind.SCHEMA_REFUSED, engine).hint
        assert hint == "register it first, or let it be registered: auto_register_schemas: true"
        engine, got = converted(avro(registry, auto_register_schemas=True))
        engine.run()
        if way == "registered first":
            engine, got = converted(strict)
            engine.run()
        assert numbers_in(registry, got) == NUMBERS


def let_through(registry: FakeRegistry, hint: str) -> None:
    """Send the request that a hint names."""
    found = re.search(r"`PUT (/config/\S+)` with (\{.*?\})", hint)
    assert found is not None
    connection = http.client.HTTPConnection(registry.url.removeprefix("http://"))
    connection.request("PUT", found[1], found[2])
    assert connection.getresponse().status == 200
    connection.close()


CAST = {"type": "cast", "fields": {"number": "text"}}


@pytest.mark.follows("schema_refused")
@pytest.mark.parametrize("way", ["let through", "undone", "another topic"])
def test_an_incompatible_schema_is_forced_undone_or_sent_to_another_topic(way: str) -> None:
    with FakeRegistry() as registry:
        engine, _ = converted(avro(registry))
        engine.run()
        if way == "let through":
            for _ in range(2):  # the subject of the values, then that of the keys
                engine, got = converted(avro(registry), CAST)
                let_through(registry, refused(Kind.SCHEMA_REFUSED, engine).hint)
            engine, got = converted(avro(registry), CAST)
        else:
            engine, _ = converted(avro(registry), CAST)
            hint = refused(Kind.SCHEMA_REFUSED, engine).hint
            assert "or undo it in the table, or write to other topics: topic_prefix, routes" in hint
            route = {"type": "route", "regex": "(.*)", "replacement": "$1.2"}
            engine, got = converted(avro(registry), *([] if way == "undone" else [CAST, route]))
        engine.run()
        assert numbers_in(registry, got) == NUMBERS


# ---------------------------------------------------------------------- transformations


@pytest.mark.follows("transform_failed")
@pytest.mark.parametrize("way", ["corrected", "for its tables alone"])
def test_a_wrong_expression_is_corrected_or_restricted_by_a_predicate(way: str) -> None:
    store, got = Store(), []

    def engine(where: str, **more: Any) -> Engine:
        options = {
            "transformations": [{"type": "filter", "where": where, **more}],
            "predicates": {"other": {"type": "topic", "pattern": "other"}},
        }
        return Engine(connector=LinesSource(10), on_record=got.append, offsets=store, options=options)

    hint = refused(Kind.TRANSFORM_FAILED, engine("after.numbre > 0")).hint
    if way == "corrected":
        assert "correct the expression" in hint
        engine("after.number > 0").run()
    else:
        assert "or restrict the transformation by a predicate" in hint
        engine("after.numbre > 0", predicate="other").run()
    assert [record.after["number"] for record in got] == NUMBERS


# ---------------------------------------------------------------------- the user's code


def lines_of_cause(error: TailraceError) -> list[str]:
    """Return the lines of the traceback of an error's causes."""
    assert error.__cause__ is not None
    text = "".join(traceback.format_exception(error.__cause__))
    return [line.strip() for line in text.splitlines()]


@pytest.mark.follows("task_failed")
def test_the_cause_of_a_handlers_error_leads_to_the_line_to_correct() -> None:
    seen, store = Seen(), Store()

    def wrong(record: Any) -> None:
        seen.record(record) if record.after["number"] < 6 else record.after["numbre"]

    def engine(handler: Any) -> Engine:
        return Engine(connector=LinesSource(10), on_record=handler, offsets=store)

    error = refused(Kind.TASK_FAILED, engine(wrong))
    assert error.hint == "the cause of this error has its message and traceback"
    assert str(error.__cause__) == "'numbre'"
    assert any('record.after["numbre"]' in line for line in lines_of_cause(error))
    engine(seen.record).run()
    assert seen.lines["0-0"] == NUMBERS


class Shout:
    """A user's transformation; the wrong one does not handle lines without a note."""

    def __init__(self, *, wrong: bool) -> None:
        self._wrong = wrong

    def apply_record(self, record: Record) -> Record:
        assert record.after is not None
        note = record.after["note"].upper() if self._wrong else "none"
        return record.replace(after={**record.after, "note": note})


@pytest.mark.follows("task_failed")
def test_the_cause_of_a_transformations_error_leads_to_the_line_to_correct() -> None:
    got: list[Any] = []

    def engine(*, wrong: bool) -> Engine:
        return Engine(connector=LinesSource(10), on_record=got.append, transformations=[Shout(wrong=wrong)])

    error = refused(Kind.TASK_FAILED, engine(wrong=True))
    assert "the cause of this error has its message and traceback" in error.hint
    assert any('record.after["note"].upper()' in line for line in lines_of_cause(error))
    engine(wrong=False).run()
    assert [record.after["note"] for record in got] == ["none"] * 10
