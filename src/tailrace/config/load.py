"""From a file to a `PipelineConfig`, or to everything that is wrong with it at once."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tailrace.config.document import DOCUMENT_BYTES_MAX, Document, parse
from tailrace.config.fields import context_for
from tailrace.config.problems import Problem, from_pydantic
from tailrace.config.sections import LATER_SINKS, SINK_TYPES, PipelineConfig
from tailrace.errors import Kind, TailraceError


def load(path: str | Path) -> PipelineConfig:
    """Return the pipeline that the YAML file at `path` describes.

    Relative paths in the file are relative to the file. No secret is resolved.

    :raises TailraceError: `CONFIG_INVALID`; its message lists every problem, a line each, and
        `context["problems"]` has the same as values.
    """
    config, problems = read(path)
    if config is None:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"read the configuration {os.fspath(path)}: {_count(problems)}{lines}",
            "correct the file; every setting is described in docs/configuration.md",
        )
    return config


def read(path: str | Path) -> tuple[PipelineConfig | None, list[Problem]]:
    """Return the pipeline and no problems, or no pipeline and every problem, in file order.

    Never raises: a file that can't be read is a problem too.
    """
    file = Path(path)
    try:
        with file.open("rb") as opened:
            text = opened.read(DOCUMENT_BYTES_MAX + 1)
    except OSError as error:
        return None, [Problem((), f"the file can't be read: {error.strerror}")]
    document = parse(text)
    if document.content is None:
        return None, list(document.problems) or [Problem((), "the file is empty")]
    return validate(document, file.absolute().parent)


def validate(document: Document, base: Path) -> tuple[PipelineConfig | None, list[Problem]]:
    """As `read`, for a document that was parsed already; `base` is what paths are relative to."""
    problems = [*document.problems, *collisions(document.content, base)]
    config = None
    if not isinstance(document.content, dict):
        problems.append(Problem((), "must be a mapping with the keys name, source, log and sinks"))
    else:
        try:
            config = PipelineConfig.model_validate(document.content, context=context_for(base))
        except ValidationError as error:
            problems += from_pydantic(error, PipelineConfig, SINK_TYPES, LATER_SINKS)
    placed = [
        problem if problem.line else replace(problem, line=document.line_of(problem.path))
        for problem in problems
    ]
    placed.sort(key=lambda problem: problem.line or 0)
    return (None, placed) if placed else (config, [])


def collisions(content: Any, base: Path) -> list[Problem]:
    """Return what sections do to each other: names and targets that are used twice.

    Works on the plain document, so that these are reported beside everything else.
    """
    sinks = content.get("sinks") if isinstance(content, dict) else None
    log = content.get("log") if isinstance(content, dict) else None
    taken: dict[Path, str] = {}
    if isinstance(log, dict) and isinstance(log.get("path"), str):
        taken[_place(log["path"], base)] = "log.path"
    problems: list[Problem] = []
    names: dict[str, int] = {}
    for index, sink in enumerate(sinks if isinstance(sinks, list) else []):
        if not isinstance(sink, dict):
            continue
        name, path = sink.get("name"), sink.get("path")
        if isinstance(name, str) and name:
            if name in names:
                problems.append(Problem(("sinks", index, "name"), f"is the name of sinks[{names[name]}] too"))
            names.setdefault(name, index)
        if isinstance(path, str) and path and "\0" not in path:
            place = _place(path, base)
            for other, owner in taken.items():
                if place == other or place in other.parents or other in place.parents:
                    problems.append(
                        Problem(
                            ("sinks", index, "path"), f"overlaps {owner}: each needs a directory of its own"
                        )
                    )
                    break
            taken.setdefault(place, f"sinks[{index}].path")
    return problems


def _place(path: str, base: Path) -> Path:
    return Path(os.path.normpath(base / Path(path.replace("\0", "")).expanduser()))


def _count(problems: list[Problem]) -> str:
    return "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
