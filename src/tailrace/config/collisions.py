"""Finds names, slots and paths that sections of a file use twice.

Works on the plain document, so that these problems are reported together with all others, each at
its place. Values of a wrong type are ignored here: the models report them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tailrace.config.kafka import KafkaSinkConfig
from tailrace.config.problems import ConfigProblem, nearest
from tailrace.config.sections import PythonSinkConfig, Sink, default_name
from tailrace.config.source.libpq import parse_dsn
from tailrace.config.source.postgres import SLOT_BYTES_MAX, slot_named_after


def collisions(content: Any, base: Path) -> list[ConfigProblem]:
    """Return the problems; paths in the document are relative to `base`."""
    if not isinstance(content, dict):
        return []
    return [*_sources(content), *_sinks(content, base), *_groups(content), *_predicates(content)]


def _sources(content: dict[str, Any]) -> Iterator[ConfigProblem]:
    source, sources = content.get("source"), content.get("sources")
    if "sources" not in content:
        if source is None:
            yield ConfigProblem(("source",), "is required, or sources for several")
        return
    if "source" in content:
        yield ConfigProblem(("sources",), "is given together with source: move source into it, with a name")
    if sources == []:
        yield ConfigProblem(("sources",), "must be a list of at least one source")
    pipeline = content.get("name") if isinstance(content.get("name"), str) else ""
    entries = list(_entries(content, "sources"))
    yield from _source_names(pipeline or "", entries)
    yield from _slots(pipeline or "", entries)


def _source_names(pipeline: str, entries: list[tuple[int, dict[str, Any]]]) -> Iterator[ConfigProblem]:
    taken: dict[str, int] = {}
    for index, entry in entries:
        name = entry.get("name")
        if not isinstance(name, str) or not name:
            continue
        place = ("sources", index, "name")
        slot = slot_named_after(f"{pipeline}_{name}")
        if len(slot) > SLOT_BYTES_MAX:
            yield ConfigProblem(
                place,
                f"is too long: the slot {slot!r} would have {len(slot)} characters, {SLOT_BYTES_MAX} are "
                "possible",
            )
        if slot in taken:
            other = taken[slot]
            same = entries[[at for at, _ in entries].index(other)][1]["name"] == name
            yield ConfigProblem(
                place,
                f"is the name of sources[{other}] too"
                if same
                else f"differs from the name of sources[{other}] only in what a slot's name can't hold",
            )
        taken.setdefault(slot, index)


def _slots(pipeline: str, entries: list[tuple[int, dict[str, Any]]]) -> Iterator[ConfigProblem]:
    # Slots belong to a server, not to a database. If one server has two names in the file, the second
    # source finds the slot of the first at its start, and refuses it.
    taken: dict[tuple[str, str], int] = {}
    for index, entry in entries:
        slot, name = entry.get("slot"), entry.get("name")
        if not slot and isinstance(name, str):
            slot = slot_named_after(f"{pipeline}_{name}")
        if not isinstance(slot, str):
            continue
        key = (_server(entry), slot)
        other = taken.setdefault(key, index)
        if other != index and entry.get("slot"):
            yield ConfigProblem(
                ("sources", index, "slot"), f"is the slot of sources[{other}] on the same server"
            )


def _server(entry: dict[str, Any]) -> str:
    dsn = entry.get("dsn")
    known = parse_dsn(dsn) or {"host": dsn} if isinstance(dsn, str) else {}
    found = {**known, **{name: value for name, value in entry.items() if value is not None}}
    return "|".join(str(found.get(name, "")) for name in ("host", "hostaddr", "port", "service"))


def _sinks(content: dict[str, Any], base: Path) -> Iterator[ConfigProblem]:
    log = content.get("log")
    taken: dict[Path, str] = {}
    if isinstance(log, dict) and isinstance(log.get("path"), str):
        taken[_place(log["path"], base)] = "log.path"
    names: dict[str, int] = {}
    for index, sink in _entries(content, "sinks"):
        name, path = sink.get("name"), sink.get("path")
        if isinstance(name, str) and name:
            if name in names:
                yield ConfigProblem(("sinks", index, "name"), f"is the name of sinks[{names[name]}] too")
            names.setdefault(name, index)
        if isinstance(path, str) and path and "\0" not in path:
            place = _place(path, base)
            for other, owner in taken.items():
                if place == other or place in other.parents or other in place.parents:
                    yield ConfigProblem(
                        ("sinks", index, "path"), f"overlaps {owner}: each needs its own directory"
                    )
                    break
            taken.setdefault(place, f"sinks[{index}].path")


def shared_names(content: Any, sinks: Sequence[Sink]) -> list[ConfigProblem]:
    """Return problems of sinks without a name whose default name is not unique, if it identifies positions.

    Another order in the file, or a sink that is added before them, would give one the position of another.

    :param sinks: the sinks that the content describes.
    """
    names = {sink.name: index for index, sink in reversed([*enumerate(sinks)])}
    found = []
    for index, entry in _entries(content, "sinks"):
        default = default_name(sinks[index])
        by_name = isinstance(sinks[index], PythonSinkConfig | KafkaSinkConfig)
        if by_name and not entry.get("name") and sinks[index].name != default:
            found.append(
                ConfigProblem(
                    ("sinks", index, "name"),
                    f"is required: without it, only their order distinguishes this sink, and its position, "
                    f"from sinks[{names[default]}]. So far this one is {sinks[index].name}, and "
                    f"sinks[{names[default]}] is {default}: give them these names",
                )
            )
    return found


def _predicates(content: dict[str, Any]) -> Iterator[ConfigProblem]:
    shared = _names_in(content)
    yield from _unknown_predicates((), "predicates", content, [])
    yield from _unknown_predicates(("engine",), "engine.predicates", content.get("engine"), [])
    for index, sink in _entries(content, "sinks"):
        yield from _unknown_predicates(("sinks", index), "its predicates or those of the file", sink, shared)
        for name in _names_in(sink):
            if name in shared:
                path = ("sinks", index, "predicates", name)
                yield ConfigProblem(path, "is the name of a predicate of the file too: choose another")


def _unknown_predicates(
    place: tuple[str | int, ...], where: str, section: Any, shared: list[str]
) -> Iterator[ConfigProblem]:
    names = [*_names_in(section), *shared]
    for index, step in _entries(section, "transformations"):
        name = step.get("predicate")
        if isinstance(name, str) and name not in names:
            there = f"there are {', '.join(names)}" if names else "there is none"
            yield ConfigProblem(
                (*place, "transformations", index, "predicate"),
                f"is no name in {where}: {there}{nearest(name, names)}",
            )


def _names_in(section: Any) -> list[str]:
    known = section.get("predicates") if isinstance(section, dict) else None
    return [str(name) for name in known] if isinstance(known, dict) else []


def _groups(content: dict[str, Any]) -> Iterator[ConfigProblem]:
    # Two sinks of one transactional id would fence each other, and share an offset.
    taken: dict[str, int] = {}
    for index, sink in _entries(content, "sinks"):
        if sink.get("type") == "kafka":
            group = str(sink.get("group", "tailrace"))
            other = taken.setdefault(group, index)
            if other != index:
                yield ConfigProblem(
                    ("sinks", index, "group"),
                    f"is that of sinks[{other}] too: they would share offsets and fence each other; "
                    "give each sink its own group",
                )


def _entries(section: Any, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the mappings of a list in a section, each with its index; nothing if it is not a list."""
    found = section.get(name) if isinstance(section, dict) else None
    for index, entry in enumerate(found if isinstance(found, list) else []):
        if isinstance(entry, dict):
            yield index, entry


def _place(path: str, base: Path) -> Path:
    return Path(os.path.normpath(base / os.path.expanduser(path.replace("\0", ""))))
