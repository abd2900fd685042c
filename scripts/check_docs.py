"""Checks the links, commands, module names and configurations in the documents against the tree.

Every relative link in a tracked Markdown file must name a file of the tree, and its anchor a
heading of that file; every module that is named by its path, and every class by its full name, must exist;
every fenced line that starts with `tailrace` must have an existing command and options; every fenced YAML
document with a `source` must be a valid pipeline. Prints each problem; the exit status is then 1.
"""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from tailrace import config
from tailrace.cli.main import app
from tailrace.errors import TailraceError

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]*)(?:#([^)\s]+))?[^)]*\)")
MODULE = re.compile(r"`(\w[\w/]*/\w+\.py)`")
CLASS = re.compile(r"`(tailrace(?:\.\w+)*)\.([A-Z]\w*)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def documents() -> list[Path]:
    """Return the Markdown files that are tracked, or untracked and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\n") if name and (ROOT / name).exists()]


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, in GitHub's form."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", document.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(document: Path, text: str) -> Iterator[str]:
    """Yield the relative links whose target does not exist."""
    for target, anchor in LINK.findall(FENCE.sub("", text)):
        path = document.parent / target if target else document
        if "://" in target:
            continue
        if not path.exists():
            yield f"link to {target}: no such file"
        elif anchor and path.suffix == ".md" and anchor not in anchors(path):
            yield f"link to {target}#{anchor}: no such heading"


def missing_modules(text: str) -> Iterator[str]:
    """Yield the modules that are named by their path and do not exist."""
    for name in MODULE.findall(FENCE.sub("", text)):
        if not any((folder / name).exists() for folder in (ROOT, ROOT / "src" / "tailrace")):
            yield f"`{name}`: no such module"


def missing_classes(text: str) -> Iterator[str]:
    """Yield the classes that are named with their module and do not exist."""
    for module, name in CLASS.findall(FENCE.sub("", text)):
        if not hasattr(importlib.import_module(module), name):
            yield f"`{module}.{name}`: no such class"


def unknown_commands(text: str) -> Iterator[str]:
    """Yield the command lines that the command line would refuse."""
    for _, block in FENCE.findall(text):
        for line in block.splitlines():
            if not line.lstrip().startswith("tailrace"):
                continue
            words = shlex.split(line, comments=True)
            if words[:1] == ["tailrace"] and (problem := _problem_of(words[1:])):
                yield f"`{line.strip()}`: {problem}"


def _problem_of(words: list[str]) -> str | None:
    command: Any = get_command(app)  # some versions of typer contain their own click
    while (inner := getattr(command, "commands", {})) and words and not words[0].startswith("-"):
        if words[0] not in inner:
            return f"there is no command {words[0]!r}"
        command, words = inner[words[0]], words[1:]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    unknown = [word for word in words if word.startswith("--") and word.split("=")[0] not in known]
    return f"{command.name} has no option {unknown[0]}" if unknown else None


def invalid_pipelines(text: str) -> Iterator[str]:
    """Yield the problems of the pipelines in a document."""
    for language, block in FENCE.findall(text):
        if language == "yaml" and re.search(r"^sources?:", block, re.MULTILINE):
            with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
                file.write(block)
                file.flush()
                try:
                    config.load_engine(Path(file.name))
                except TailraceError as error:
                    yield f"pipeline: {error}"


def main() -> int:
    """Print every problem of every document; return the exit status."""
    problems = 0
    for document in documents():
        text = document.read_text("utf-8")
        found = [*broken_links(document, text), *unknown_commands(text), *invalid_pipelines(text)]
        if document.name != "CHANGELOG.md":  # it names removed modules
            found += [*missing_modules(text), *missing_classes(text)]
        for problem in found:
            print(f"{document.relative_to(ROOT)}: {problem}")
        problems += len(found)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
