"""Messages for the problems of a configuration, each with its place in the file.

Pydantic's own messages may quote the refused value, which may be a password in the wrong place.
So none of them is shown: every message is made here from the kind of the error and the field's
limits.
"""

from __future__ import annotations

import difflib
import inspect
import re
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Tag, ValidationError
from pydantic_core import ErrorDetails

from tailrace.config.fields import Section
from tailrace.secrets import REFUSAL

Path = tuple[str | int, ...]

_OFFSETS = "store offsets by `type: log`, `file` or `kafka`; the engine then begins at the log's start"
_CLOUD = "give `registry_username` and `registry_password`: an API key of Confluent's cloud and its secret"

#: Most keys of a section that are listed in the message about an unknown key.
_LISTED_MAX = 16

#: Replacements of removed keys, by section and key, and of removed values, by section, key and value.
REMOVED: Mapping[str, str] = {
    "source.snapshot_chunk_bytes": "leave it out, or set `snapshot_chunk_rows`: chunks have at most 16 MiB",
    "slot_watch.safe_wal_share_warned": "leave it out: less than 30 % left is a warning",
    "slot_watch.transaction_age_warned_s": "leave it out: transactions older than 300 s are a warning",
    "source.messages": "leave it out, or set `message_prefixes: []` for no messages",
    "log.snapshot_compression": "leave it out: rows of a snapshot are not compressed",
    "engine.task_restarts_max": "leave it out: a task is started again up to 10 times in a row",
    "converter.registry_logical_cluster": _CLOUD,
    "converter.registry_identity_pool": _CLOUD,
    "converter.normalize_schemas": "leave it out: the registry's own configuration has `normalize`",
    "sinks.transaction_records": "set `batch_rows_max`, which `transaction_boundary: records` uses",
    "source.snapshot_read_on": "leave it out: snapshots are read over `snapshot_connections` connections",
    "offset_storage.type: postgresql": _OFFSETS,
    "offset_storage.dsn": _OFFSETS,
    "offset_storage.table": _OFFSETS,
    "converter.mode": "leave it out: a value is the whole event, as Debezium writes it",
    "converter.registry_deadline_ms": "set `registry_timeout_ms`: a request is made up to three times at "
    "each address of the registry",
    "sinks.dead_letter_value_bytes": "leave it out: `tailrace log show` at the letter's "
    "`tailrace.log_offset` has the change",
    "sinks.too_large": "set `dead_letter_topic` for dead letters, such as `<topic_prefix>.dead-letter`; "
    "without it a record that is too large stops the sink",
    "sinks.schema_changes": "set `schema_changes_topic`, such as to `<topic_prefix>`; without it there are "
    "none",
    "sinks.heartbeat_topic": "set `heartbeat_topic_prefix`: the topic is "
    "`<heartbeat_topic_prefix>.<topic_prefix>`",
}


_MARKED = re.compile(r"<.*>|(function-\w+|tuple)\[.*\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """A problem at `path` in the file (empty: of the file as a whole)."""

    path: Path
    message: str
    line: int | None = None

    @property
    def place(self) -> str:
        """The path as text: `sinks[1].mode`."""
        text = ""
        for part in self.path:
            text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
        return text

    def __str__(self) -> str:
        where = self.place
        if self.line is not None:
            where += f" (line {self.line})" if where else f"line {self.line}"
        return f"{where}: {self.message}" if where else self.message


def from_pydantic(error: ValidationError, model: type[Section], tags: Iterable[str]) -> list[ConfigProblem]:
    """Return the problems in `error`, which validating `model` raised.

    :param tags: values of `type` that select a model; pydantic puts them into the path.
    """
    problems: dict[tuple[Path, str], ConfigProblem] = {}
    tags = tuple(tags)
    details = error.errors(include_url=False, include_context=True)
    within = {detail["loc"][:-1] for detail in details}
    for detail in details:
        if detail["type"] == "too_short" and detail["loc"] in within:
            continue  # pydantic counts valid entries only
        path = _path(detail["loc"], tags)
        if detail["type"] in ("union_tag_invalid", "union_tag_not_found"):
            path = (*path, "type")
        message = _message(detail, model, tags)
        problems.setdefault((path, message), ConfigProblem(path, message))
    return list(problems.values())


def instead_of(path: tuple[str | int, ...], value: object = None) -> str | None:
    """Return the message for a key or value that only an earlier version had; None if it had no such.

    :param path: of the key in the file.
    :param value: the key's value; None: the key itself.
    """
    names = [str(part) for part in path if not isinstance(part, int)]
    names = ["source" if name == "sources" else name for name in names]
    key = ".".join(names[-2:])
    found = REMOVED.get(key if value is None else f"{key}: {value}")
    return None if found is None else f"is not a setting any more: {found}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean …?` if a known name is similar, otherwise the empty text."""
    found = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.6)
    return f"; did you mean {found[0]!r}?" if found else ""


def _listed(known: list[str]) -> str:
    return f"; possible are {', '.join(known)}" if 0 < len(known) <= _LISTED_MAX else ""


def _path(loc: Path, tags: tuple[str, ...]) -> Path:
    # `sinks, 0, delta, mode` is `sinks[0].mode` in the file, and so is `sinks, 0, <delta>, mode`.
    return tuple(
        part
        for at, part in enumerate(loc)
        if not _is_marked(part) and not (part in tags and at and isinstance(loc[at - 1], int))
    )


def _is_marked(part: object) -> bool:
    # Tags of unions with a function as discriminator are marked by < and >, so that they differ from keys.
    # Of other unions, pydantic names the type: `tuple[str, ...]`.
    return isinstance(part, str) and _MARKED.fullmatch(part) is not None


def _message(detail: ErrorDetails, model: type[Section], tags: tuple[str, ...]) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        name = str(detail["loc"][-1])
        known = _names_at(model, detail["loc"][:-1])
        if name == "password" and "password" not in known:
            return f"unknown key, and {REFUSAL}"
        removed = instead_of(_path(detail["loc"], tags))
        return removed or "unknown key" + (nearest(name, known) or _listed(known))
    if kind == "union_tag_invalid":
        tag = str(context.get("tag", ""))
        if _is_marked(tag):
            return _marked_message(tag[1:-1], str(context.get("expected_tags", "")))
        return "must be one of " + ", ".join(tags) + nearest(tag, tags)
    if kind == "union_tag_not_found":
        return "is required: one of " + ", ".join(tags)
    if kind == "value_error":
        return str(context.get("error", "is not valid"))
    if kind == "literal_error" and (removed := instead_of(_path(detail["loc"], tags), detail["input"])):
        return removed
    return _plain_message(kind, context)


def _marked_message(tag: str, expected: str) -> str:
    known = [name for name in re.findall(r"<([^>]*)>", expected) if name.isidentifier()]
    listed = ", ".join(known)
    if not tag:
        return f"is required: one of {listed}"
    return f"must be one of {listed}, or what an installed package offers{nearest(tag, known)}"


def _plain_message(kind: str, context: Mapping[str, Any]) -> str:
    bounds = {
        "greater_than": "must be greater than {gt}",
        "greater_than_equal": "must be at least {ge}",
        "less_than": "must be less than {lt}",
        "less_than_equal": "must be at most {le}",
        "too_long": "must have at most {max_length} entries",
        "too_short": "must have at least {min_length} entries",
        "string_too_short": "must have at least {min_length} characters",
        "literal_error": "must be one of {expected}",
    }
    if kind in bounds:
        return bounds[kind].format(**context)
    words = {
        "missing": "is required",
        "string_type": "must be text: put it in quotes",
        "model_type": "must be a section with keys of its own",
        "model_attributes_type": "must be a section with keys of its own",
        "dict_type": "must be a section with keys of its own",
        "tuple_type": "must be a list",
        "bool_type": "must be true or false",
        "bool_parsing": "must be true or false",
        "finite_number": "must be a finite number",
    }
    if kind.startswith("int_"):
        return "must be a whole number"
    if kind.startswith("float_"):
        return "must be a number"
    return words.get(kind, f"is not valid ({kind})")


def _names_at(model: type[Section], loc: Path) -> list[str]:
    # Follows the path through the models; a tag in it selects a model of a union.
    candidates: list[tuple[str, type[Section]]] = [("", model)]
    for part in loc:
        if isinstance(part, int):
            continue
        deeper = [
            found
            for _, candidate in candidates
            if part in candidate.model_fields
            for found in _models_in(candidate.model_fields[str(part)].annotation)
        ]
        chosen = [found for found in candidates if found[0] == str(part)]
        candidates = deeper or chosen or candidates
    return sorted({name for _, candidate in candidates for name in candidate.key_names()})


def _models_in(annotation: Any, tag: str = "") -> list[tuple[str, type[Section]]]:
    """Return the sections that a field can have as its value, each with the tag that selects it."""
    if inspect.isclass(annotation) and issubclass(annotation, Section):
        return [(tag or _type_of(annotation), annotation)]
    tags = [mark.tag for mark in getattr(annotation, "__metadata__", ()) if isinstance(mark, Tag)]
    return [
        found
        for inner in typing.get_args(annotation)
        for found in _models_in(inner, tags[0] if tags else tag)
    ]


def _type_of(model: type[Section]) -> str:
    field = model.model_fields.get("type")
    values = typing.get_args(field.annotation) if field else ()
    return str(values[0]) if values else ""
