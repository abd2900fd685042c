"""Transformations in an engine: from its options, before a converter; dropped records count as processed."""

from __future__ import annotations

import json
from typing import Any

from tailrace import Engine
from tailrace.records.events import Event, Events
from tailrace.records.record import Record
from tailrace.testing import LinesSource

OPTIONS: dict[str, Any] = {
    "predicates": {
        "even": {"type": "expression", "where": "after.number % 2 = 0"},
        "lines": {"type": "topic", "pattern": r"lines\..*"},
    },
    "transformations": [
        {"type": "drop", "predicate": "even"},
        {"type": "set_headers", "headers": {"n": "after.number"}},
        {"type": "mask", "fields": ["line"], "method": "truncate", "length": 9, "predicate": "lines"},
        {"type": "flatten", "add_fields": ["op"]},
        {"type": "route", "topic": "case when value.number > 5 then 'late' else 'early' end"},
    ],
}


class Doubled:
    """Doubles numbers."""

    def apply_record(self, record: Record) -> Record | None:
        value = record.value
        return record.replace(value={**value, "number": value["number"] * 2})

    def close(self) -> None:
        pass


def expected(number: int) -> dict[str, Any]:
    return {"partition": "0-0", "number": number * 2, "line": "Generated", "__op": "c"}


def test_transformations_of_the_options_and_of_the_program_apply() -> None:
    source, got = LinesSource(10), []

    def handle(record: Record) -> None:
        got.append((record.topic, record.value, dict(record.headers)))

    Engine(connector=source, on_record=handle, options=OPTIONS, transformations=[Doubled()]).run()
    topics = {1: "early", 3: "early", 5: "early", 7: "late", 9: "late"}
    assert got == [(topic, expected(number), {"n": number}) for number, topic in topics.items()]
    # Line 10 was dropped, and counts as processed.
    assert source.committed["0-0"][-1] == 10


def test_events_are_converted_from_the_transformed_records() -> None:
    got: list[tuple[str, Any]] = []

    def handle(events: Events) -> None:
        got.extend((event.topic, json.loads(event.value)) for event in events if isinstance(event, Event))

    Engine(
        connector=LinesSource(4),
        on_batch=handle,
        converter="json",
        options=OPTIONS,
        transformations=[Doubled()],
    ).run()
    assert got == [("early", expected(1)), ("early", expected(3))]
