"""The checks of stages for third parties: they pass for correct stages and find broken ones."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from tailrace.converters.cloudevents import CloudEventsConverter
from tailrace.converters.debezium import JsonConverter
from tailrace.converters.native import ArrowConverter, PythonConverter
from tailrace.records.events import Converted
from tailrace.records.group import Group
from tailrace.testing import stages
from tailrace.transforms.selection import Drop, Operations, TopicChoice
from tests.support.converters.customers import groups_of


class Keeping:
    """A transformation of groups that keeps everything."""

    def apply(self, group: Group) -> list[Group]:
        return [group]

    def close(self) -> None:
        pass


class Shouting:
    """A transformation of single records."""

    def apply_record(self, record: Any) -> Any:
        return None if record.after["number"] % 3 == 0 else record.replace(topic=record.topic.upper())

    def close(self) -> None:
        pass


class Nowhere:
    """An object that can't be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    apply = Keeping.apply
    close = Keeping.close


class Twice(Keeping):
    def apply(self, group: Group) -> list[Group]:
        return [group, group]


class Raising(Keeping):
    def apply(self, group: Group) -> list[Group]:
        raise KeyError


class Counting(Keeping):
    """Keeps state from call to call."""

    calls = 0

    def apply(self, group: Group) -> list[Group]:
        self.calls += 1
        return [group.with_topic(str(self.calls))]


class Sized(Keeping):
    """Its result depends on the number of records."""

    def apply(self, group: Group) -> list[Group]:
        return [group.with_topic(str(len(group)))]


@pytest.mark.parametrize("make", [Keeping, Shouting, Drop])
def test_transformations_that_fulfil_the_contract_pass(make: Any) -> None:
    stages.check_transformation(make)


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (object, "apply or apply_record"),
        (Nowhere, "it pickles"),
        (Twice, "returned a place twice"),
        (Raising, "KeyError was raised"),
        (Counting, "a second call gives the same"),
        (Sized, "does not depend on the others"),
    ],
)
def test_a_transformation_that_breaks_a_rule_is_found(make: Any, rule: str) -> None:
    with pytest.raises(AssertionError, match=rule):
        stages.check_transformation(make)


class Even:
    def matches(self, group: Group) -> Any:
        return np.array([n % 2 == 0 for n in group.columns.column("after").field("number").to_pylist()])


class Listed:
    def matches(self, group: Group) -> Any:
        return [True] * len(group)


class First:
    def matches(self, group: Group) -> Any:
        return np.arange(len(group)) == 0


def test_predicates_are_checked() -> None:
    stages.check_predicate(Even)
    stages.check_predicate(lambda: Operations("c"))
    stages.check_predicate(lambda: TopicChoice("lines.*"))
    for make, rule in (
        (object, "a predicate has matches"),
        (Listed, "an array of booleans"),
        (First, "depend on the others"),
    ):
        with pytest.raises(AssertionError, match=rule):
            stages.check_predicate(make)  # type: ignore[arg-type]


class Nothing:
    def convert(self, group: Group) -> Any:
        return None

    def close(self) -> None:
        pass


class TooFew(Nothing):
    def convert(self, group: Group) -> Any:
        return Converted(None, ["x"])


class OtherKeys(JsonConverter):
    def keys(self, group: Group) -> Any:
        found = super().keys(group)
        return found._replace(keys=None)


@pytest.mark.parametrize("case", ["create", "key_change_full", "delete"])
@pytest.mark.parametrize("make", [JsonConverter, CloudEventsConverter, ArrowConverter, PythonConverter])
def test_our_converters_fulfil_the_contract(make: Any, case: str) -> None:
    stages.check_converter(make, groups_of(case))


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (object, "convert and close"),
        (Nothing, "returned NoneType"),
        (TooFew, "1 events for 40 records"),
    ],
)
def test_a_converter_that_breaks_a_rule_is_found(make: Any, rule: str) -> None:
    with pytest.raises(AssertionError, match=rule):
        stages.check_converter(make)


def test_keys_that_differ_from_those_of_the_events_are_found() -> None:
    with pytest.raises(AssertionError, match="keys are those of convert"):
        stages.check_converter(OtherKeys, groups_of("create"))
