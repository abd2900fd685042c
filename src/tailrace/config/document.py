"""Parses YAML into plain values with their lines.

Uses the safe loader, and accepts one document of limited size, depth and number of values (aliases can
make a short file long), without duplicate keys. A problem never quotes the file: a value in a wrong
place may be a password.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

from tailrace.config.problems import ConfigProblem, Path

DOCUMENT_BYTES_MAX = 1024 * 1024
NODES_MAX = 20_000
DEPTH_MAX = 20

_MERGE, _TEXT = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:str"


@dataclass(frozen=True, slots=True)
class Document:
    """A file's content, and the line (from 1) of each path in it."""

    content: Any
    lines: dict[Path, int]
    problems: tuple[ConfigProblem, ...] = ()

    def line_of(self, path: Path) -> int | None:
        """Return the line of the value at `path`, or of the nearest one around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path)


def parse(text: bytes) -> Document:
    """Return the document in `text`; if it can't be read, with problems and without content."""
    if len(text) > DOCUMENT_BYTES_MAX:
        return _unreadable(f"the file is larger than {DOCUMENT_BYTES_MAX} bytes")
    try:
        loader = yaml.SafeLoader(text.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return _unreadable("the file is not UTF-8 text")
    except yaml.YAMLError as error:
        return _unreadable(_reason(error), _line(error))
    try:
        root = loader.get_single_node()
        if root is None:
            return _unreadable("the file is empty")
        walk = _Walk(loader)
        walk.visit(root, ())
        content = None if walk.is_unreadable else loader.construct_document(root)
        return Document(content, walk.lines, tuple(walk.problems))
    except yaml.YAMLError as error:
        return _unreadable(_reason(error), _line(error))
    except _TooMuchError:
        return _unreadable("the file has too many values, or nests them too deeply")
    except (RecursionError, ValueError, OverflowError, TypeError):
        return _unreadable("a value in the file can't be read")
    finally:
        loader.dispose()


class _TooMuchError(Exception):
    pass


class _Walk:
    """Collects the line of every value, and problems of values such as the date `0000-00-00`, of duplicate
    keys and of keys that are not words.
    """

    def __init__(self, loader: yaml.SafeLoader) -> None:
        self._loader = loader
        self.is_unreadable = False
        self.lines: dict[Path, int] = {}
        self.problems: list[ConfigProblem] = []
        self._visited = 0

    def visit(self, node: yaml.Node, path: Path) -> None:
        self._visited += 1
        if self._visited > NODES_MAX or len(path) > DEPTH_MAX:
            raise _TooMuchError
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self.visit(item, (*path, index))
        elif isinstance(node, yaml.MappingNode):
            self._visit_mapping(node, path)
        else:
            self._visit_scalar(node, path)

    def _visit_scalar(self, node: yaml.Node, path: Path) -> None:
        try:
            self._loader.construct_object(node)
        except (ValueError, OverflowError, TypeError):
            self.is_unreadable = True
            kind = node.tag.rpartition(":")[2]
            message = f"is not a valid {kind}: put it in quotes if it is text"
            self.problems.append(ConfigProblem(path, message, node.start_mark.line + 1))

    def _visit_mapping(self, node: yaml.MappingNode, path: Path) -> None:
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                self.problems.append(ConfigProblem(path, "has a key that is not a plain word", line))
                continue
            name = str(key.value)
            if key.tag != _MERGE:
                key.tag = _TEXT  # every key is a name: `no` and `2024` may be names of columns
            if name in seen and name != "<<":
                self.problems.append(
                    ConfigProblem((*path, name), f"is given twice, first in line {seen[name]}", line)
                )
            seen[name] = line
            self.visit(value, (*path, name))
            self.lines[(*path, name)] = line


def _unreadable(message: str, line: int | None = None) -> Document:
    return Document(None, {}, (ConfigProblem((), message, line),))


def _reason(error: yaml.YAMLError) -> str:
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "not YAML"
    return "the file is not valid YAML: " + re.sub(r"(['\"]).*\1", "…", str(problem))


def _line(error: yaml.YAMLError) -> int | None:
    mark = getattr(error, "problem_mark", None)
    return None if mark is None else mark.line + 1
