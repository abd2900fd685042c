"""Reads a file into an `EngineConfig`, or returns every problem in it at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tailrace.config.collisions import collisions, shared_names
from tailrace.config.document import DOCUMENT_BYTES_MAX, Document, parse
from tailrace.config.engine import EngineConfig
from tailrace.config.fields import context_for
from tailrace.config.problems import ConfigProblem, from_pydantic
from tailrace.config.sections import SINK_TYPES, PipelineConfig
from tailrace.config.transformations.tables import refusals
from tailrace.errors import Kind, TailraceError


def load(path: str | Path, source: str | None = None) -> PipelineConfig:
    """Return the pipeline that the YAML file at `path` describes.

    Relative paths in the file are relative to the file. No secret is resolved.

    :param source: the source whose pipeline is returned; None: the only one.
    :raises TailraceError: `CONFIG_INVALID`, as `load_engine`, or because there is no such source
        or more than one.
    """
    return load_engine(path).pipeline(source)


def load_engine(path: str | Path) -> EngineConfig:
    """Return the configuration in the YAML file at `path`, with one source or several.

    :raises TailraceError: `CONFIG_INVALID`; its message lists every problem, one per line.
    """
    config, problems = read(path)
    if config is None:
        raise _refused(f"read the configuration {os.fspath(path)}", problems)
    return config


def from_mapping(content: Mapping[str, Any], base: Path | None = None) -> EngineConfig:
    """Return the configuration of a file with this content; paths are relative to `base`.

    :raises TailraceError: `CONFIG_INVALID`, as `load_engine`.
    """
    config, problems = validate(Document(dict(content), {}, ()), base or Path.cwd())
    if config is None:
        raise _refused("read the configuration", problems)
    return config


def read(path: str | Path) -> tuple[EngineConfig | None, list[ConfigProblem]]:
    """Return the file's configuration, or None and all problems, in file order.

    Never raises: a file that can't be read is a problem too.
    """
    file = Path(path)
    try:
        with file.open("rb") as opened:
            text = opened.read(DOCUMENT_BYTES_MAX + 1)
    except OSError as error:
        return None, [ConfigProblem((), f"the file can't be read: {error.strerror}")]
    document = parse(text)
    if document.content is None:
        return None, list(document.problems) or [ConfigProblem((), "the file is empty")]
    return validate(document, file.absolute().parent)


def validate(document: Document, base: Path) -> tuple[EngineConfig | None, list[ConfigProblem]]:
    """Return what `read` does, for a parsed document; paths are relative to `base`."""
    problems = [*document.problems, *collisions(document.content, base)]
    config = None
    if not isinstance(document.content, dict):
        problems.append(ConfigProblem((), "must be a mapping with the keys name, source, log and sinks"))
    else:
        try:
            config = EngineConfig.model_validate(document.content, context=context_for(base))
        except ValidationError as error:
            found = from_pydantic(error, EngineConfig, SINK_TYPES)
            # `collisions` has reported problems of the file as a whole, at their places.
            problems += [problem for problem in found if problem.path or not problems]
        else:
            problems += [*refusals(config), *shared_names(document.content, config.sinks)]
    placed = [
        problem if problem.line else replace(problem, line=document.line_of(problem.path))
        for problem in problems
    ]
    placed.sort(key=lambda problem: problem.line or 0)
    return (None, placed) if placed else (config, [])


def _refused(attempt: str, problems: list[ConfigProblem]) -> TailraceError:
    lines = "".join(f"\n  {problem}" for problem in problems)
    return TailraceError(
        Kind.CONFIG_INVALID,
        f"{attempt}: {_count(problems)}{lines}",
        "correct it; every setting is described in docs/configuration.md",
    )


def _count(problems: list[ConfigProblem]) -> str:
    return "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
