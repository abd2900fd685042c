"""The house rules that a machine can check."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tailrace import __version__, failpoints
from tailrace.errors import Kind
from tailrace.warm import KERNEL_MODULES

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
TOOLS = ROOT / "tools"

#: Exceptions from the rules.
EXCEPTIONS: dict[str, Any] = tomllib.loads((ROOT / "tests" / "tidy.toml").read_text("utf-8"))

MODULE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70

#: Names without a meaning: a module or class is named by its subject.
EMPTY_NAMES = re.compile(r"[Uu]til|[Hh]elper|[Mm]anager|[Mm]isc|[Cc]ommon|^Abstract|^Base[A-Z]|Impl$")

#: Written in parts, so that this file does not match its own patterns.
FOREIGN = {
    "a path of somebody's machine": [rf"/{name}/" for name in ("work", "root", "farm")],
    "a package registry's host": [
        r"\.".join(parts)
        for parts in (
            ("repo1", "maven"),
            ("repo", "maven", "apache"),
            ("files", "pythonhosted"),
            ("pypi", "org"),
            ("registry", "npmjs"),
            ("proxy", "golang"),
            ("deb", "debian"),
        )
    ],
}


#: Modules that look at frames and messages, whose type letters have names there.
FRAME_MODULES = (
    "protocol/frames.py",
    "sources/postgres/connection/backend_messages.py",
    "decode/kernel.py",
    "sources/postgres/schema/relation_messages.py",
    "sources/postgres/streaming/frame_filters.py",
    "sources/postgres/streaming/unchanged_updates.py",
)


def tracked(*patterns: str) -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.splitlines() if (ROOT / name).is_file()]


def modules() -> list[Path]:
    return sorted((*SOURCE.rglob("*.py"), *TOOLS.rglob("*.py")))


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines without the docstring, which may have any length."""
    first = function.body[0]
    has_docstring = ast.get_docstring(function) is not None
    prose = (first.end_lineno or 0) - first.lineno + 1 if has_docstring else 0
    return (function.end_lineno or 0) - function.lineno + 1 - prose


def test_every_module_has_a_docstring():
    silent = [
        named(path)
        for path in modules()
        if path.read_text("utf-8").strip() and ast.get_docstring(parsed(path)) is None
    ]
    assert not silent


def test_no_module_is_too_long():
    long = {
        named(path): lines
        for path in modules()
        if (lines := path.read_text("utf-8").count("\n")) > MODULE_LINES_MAX
    }
    assert not long


def test_no_function_is_too_long():
    long = {
        f"{named(path)}:{function.lineno} {function.name}": body_lines(function)
        for path in modules()
        for function in functions(parsed(path))
        if body_lines(function) > FUNCTION_LINES_MAX
    }
    assert not long


def test_names_have_a_meaning():
    empty = [named(path) for path in modules() if EMPTY_NAMES.search(path.stem)]
    for path in modules():
        tree = parsed(path)
        classes = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        empty += [f"{named(path)} {name}" for name in classes if EMPTY_NAMES.search(name)]
    assert not empty


def test_a_public_class_name_occurs_once():
    names = Counter(
        node.name
        for path in modules()
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    twice = {name for name, count in names.items() if count > 1}
    assert twice == set(EXCEPTIONS["class_names"])


def test_modules_that_call_themselves_pure_are_checked_by_the_linter():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    pure = next(each for each in contracts if each["name"].startswith("Pure modules"))["source_modules"]
    claims = {
        ".".join(
            path.relative_to(SOURCE if SOURCE in path.parents else TOOLS).with_suffix("").parts
        ).removesuffix(".__init__")
        for path in modules()
        if re.search(r"\bPure\b", ast.get_docstring(parsed(path)) or "")
    }
    unkept = {
        name.removeprefix("tailrace.")
        for name in claims
        if not any(name == module or name.startswith(f"{module}.") for module in pure)
    }
    assert unkept == set(EXCEPTIONS["impure"])


def test_no_marks_of_unfinished_work_are_left():
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    left = [
        f"{named(path)}:{number}"
        for path in [*modules(), *tracked("tests/**/*.py", "scripts/*")]
        if path != Path(__file__).resolve()
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if marks.search(line)
    ]
    assert not left


@pytest.mark.parametrize("what", FOREIGN)
def test_no_tracked_file_names(what):
    pattern = re.compile("|".join(FOREIGN[what]))
    found = [
        f"{named(path)}:{number}"
        for path in tracked()
        for number, line in enumerate(path.read_bytes().decode("utf-8", "replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found


def test_no_test_imports_another_one():
    # Shared code of tests is in tests.support.
    importing = re.compile(r"^\s*(from|import) tests\.(?!support\b)", re.MULTILINE)
    assert not [named(path) for path in tracked("tests/*.py") if importing.search(path.read_text("utf-8"))]


def test_every_failpoint_is_somewhere_in_the_code():
    code = "\n".join(path.read_text("utf-8") for path in modules())
    missing = [name for name in sorted(failpoints.NAMES) if f'hit("{name}")' not in code]
    assert not missing


def test_every_module_with_a_kernel_is_warmed():
    with_kernels = {
        ".".join(path.relative_to(SOURCE if SOURCE in path.parents else TOOLS).with_suffix("").parts)
        for path in modules()
        if re.search(r"^@nb\.njit|^@compiled", path.read_text("utf-8"), re.MULTILINE)
    }
    assert set(KERNEL_MODULES) == with_kernels


def test_kernels_that_are_not_inlined_have_declared_signatures():
    others = re.compile(r"njit\((?!inline=\"always\"\))|\bnjit$|@(nb|numba)\.jit|@compiled\(\)", re.MULTILINE)
    users = [named(path) for path in modules() if others.search(path.read_text("utf-8"))]
    assert users == ["src/tailrace/compiled.py"]


def test_pickle_is_not_used_on_disk():
    # The checks of stages try in memory whether they can be pickled.
    users = [
        named(path)
        for path in modules()
        if path != SOURCE / "tailrace" / "testing" / "stages.py"
        and re.search(
            r"^\s*(import|from) (pickle|shelve|marshal|dill|cloudpickle)\b",
            path.read_text("utf-8"),
            re.MULTILINE,
        )
    ]
    assert not users


def followed() -> set[str]:
    """Return the marks `@pytest.mark.follows` of tests: kinds of errors, and ways out in the docs."""
    return {
        ast.literal_eval(argument)
        for path in tracked("tests/**/test_*.py")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.follows"
        for argument in node.args
    }


def ways_out() -> set[str]:
    """Return the names of the numbered items below headings of the docs with "way out"."""
    sections = [
        section
        for path in tracked("docs/*.md")
        for section in re.split(r"^#+ ", path.read_text("utf-8"), flags=re.MULTILINE)
        if "way out" in section.partition("\n")[0].lower()
    ]
    return {name for each in sections for name in re.findall(r"^\d+\. \*\*(.*?)\.?\*\*", each, re.MULTILINE)}


def test_each_way_out_in_the_docs_is_followed_by_a_test():
    assert ways_out()
    assert ways_out() <= followed()


def test_the_hint_of_each_kind_of_error_is_followed_by_a_test():
    kinds = {str(kind) for kind in Kind}
    assert followed() <= kinds | ways_out(), "every marker must name an existing kind or way out"
    assert kinds - followed() == set(EXCEPTIONS["hints"])


def test_the_version_is_defined_in_one_place() -> None:
    import importlib.metadata

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert (ROOT / project["tool"]["hatch"]["version"]["path"]).read_text().count(f'"{__version__}"') == 1
    assert importlib.metadata.version("tailrace") == __version__
    said = re.findall(r'"version":"([^"]+)"', (ROOT / "docs" / "converters.md").read_text())
    assert said == [__version__]


@pytest.mark.parametrize("name", FRAME_MODULES)
def test_type_letters_of_messages_are_compared_by_their_names(name: str) -> None:
    tree = ast.parse((SOURCE / "tailrace" / name).read_text("utf-8"))
    compared = (
        operand
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        for operand in (node.left, *node.comparators)
    )
    letters = [
        operand.lineno
        for operand in compared
        if isinstance(operand, ast.Constant)
        and isinstance(operand.value, int)
        and ord("A") <= operand.value <= ord("z")
    ]
    assert letters == []
