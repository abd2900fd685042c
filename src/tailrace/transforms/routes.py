"""Changes the topic of records, by a regular expression for topics or an expression for each record.

The records themselves stay unchanged and are not decoded, unless the former topic is added to their keys.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa

from tailrace.config.transformations import options
from tailrace.config.transformations.steps import REFERENCE, ROOTS, python_regex
from tailrace.decode.postgres_types import OIDS
from tailrace.errors import Kind, TailraceError
from tailrace.expressions.computing import Expression
from tailrace.model import Column, Relation
from tailrace.records.group import Group
from tailrace.transforms.fields import KEY, failure, with_relation
from tailrace.transforms.groups.rows import GroupRows, described, fitting_expression
from tailrace.transforms.groups.values import edited


def replaced(topic: str, regex: str, replacement: str) -> str | None:
    """Return the topic that `replacement` gives; None if `regex` does not match the whole `topic`.

    A group of `regex` that did not participate in the match is replaced by an empty text.
    """
    found = re.fullmatch(regex, topic)
    if found is None:
        return None

    def group(reference: re.Match[str]) -> str:
        name = next(filter(None, reference.groups()))
        return found[int(name) if name.isdigit() else name] or ""

    return REFERENCE.sub(group, replacement)


@dataclass(frozen=True, slots=True)
class Routing:
    """Renames topics that match a regular expression, or sets each record's topic by an expression."""

    given: options.Route
    topic: Expression | None

    @classmethod
    def of(cls, given: options.Route) -> Routing:
        return cls(given, None if given.topic is None else Expression(given.topic, ROOTS))

    def may_route(self, group: Group) -> bool:
        """Return whether a record of the group may get another topic."""
        return self.topic is not None or self._by_topic(group)[0][0] not in (None, group.topic)

    def apply(self, group: Group) -> list[Group]:
        """Return the records, a group for each topic. A record without a new topic keeps its own.

        :raises TailraceError: `TRANSFORM_FAILED` if the expression does not fit the records, or a new topic
            is not a text or is empty.
        """
        return [
            part if topic is None else _routed(part, topic, self.given.key_field)
            for topic, part in self._by_topic(group)
        ]

    def _by_topic(self, group: Group) -> list[tuple[str | None, Group]]:
        given = self.given
        if self.topic is None:
            assert given.regex is not None
            assert given.replacement is not None
            return [(replaced(group.topic, python_regex(given.regex), given.replacement), group)]
        with fitting_expression(group, "route records"):
            names = self.topic.values(GroupRows(group, given.missing))
        if pa.types.is_null(names.type):
            return [(None, group)]
        if not pa.types.is_string(names.type):
            raise failure(
                group,
                f"route records: the value of the topic's expression is {names.type}, and a topic is text",
                "cast it, or name the topic with: case when … then 'a topic' end",
            )
        return parted(group, names)


def parted(group: Group, names: pa.StringArray) -> list[tuple[str | None, Group]]:
    """Return the records grouped by name; those without a name first, under None."""
    coded = names.dictionary_encode()
    codes = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    known: dict[int, str] = dict(enumerate(coded.dictionary.to_pylist()))
    # A single sort, however many names there are; records of one name stay in their order.
    order = np.argsort(codes, kind="stable")
    present, first = np.unique(codes[order], return_index=True)
    last = [*first[1:], len(order)]
    return [
        (known.get(code), group.take(order[at:end]))
        for code, at, end in zip(present.tolist(), first, last, strict=True)
    ]


def _with_text(name: str, relation: Relation) -> Relation:
    """Return a table with another column: of texts, never NULL."""
    others = (column for column in relation.columns if column.name != name)
    return replace(relation, columns=(*others, Column(name, OIDS["text"], -1, False, not_null=True)))


def _routed(group: Group, topic: str, key_field: str | None) -> Group:
    if not topic.strip():
        raise TailraceError(
            Kind.TRANSFORM_FAILED,
            "route records: the new topic's name is empty",
            "correct the replacement or the expression; NULL keeps the record's topic",
            {"table": described(group), "topic": group.topic},
        )
    if topic == group.topic:
        return group
    # A record without a key does not get one.
    if key_field is not None and not pa.types.is_null(group.column("key").type):
        former = pa.repeat(pa.scalar(group.topic), len(group))
        key = edited(group.column("key"), lambda found: {**found, key_field: former})
        group = with_relation(group.with_column("key", key), KEY, partial(_with_text, key_field))
    return group.with_topic(topic)
