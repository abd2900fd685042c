"""Counts lines, modules, functions, settings, duplicate class names, and exceptions from the house rules.

Prints a table; `--json` prints one document. Lines are physical lines. The product is everything that
`pip install` installs: all of `src`.
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 600


def modules(folder: str) -> list[Path]:
    """Return the Python files below a folder, sorted."""
    return sorted((ROOT / folder).rglob("*.py"))


def lines_of(path: Path) -> int:
    """Return the number of lines of a file."""
    return path.read_text("utf-8").count("\n")


def functions(path: Path) -> Iterator[int]:
    """Yield the number of lines of each function, without its docstring."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            documented = ast.get_docstring(node) is not None
            prose = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
            yield (node.end_lineno or 0) - node.lineno + 1 - prose


def public_classes() -> Counter[str]:
    """Return the number of modules of the product that define each public class, by name."""
    return Counter(
        node.name
        for path in modules("src")
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )


def settings() -> int:
    """Return the number of fields of all sections of a pipeline's file."""
    from tailrace import config
    from tailrace.config.fields import Section

    assert config  # its import defines every section
    seen: set[type[Section]] = set()
    waiting: list[type[Section]] = [Section]
    while waiting:
        waiting += [each for each in waiting.pop().__subclasses__() if each not in seen]
        seen.update(waiting)
    own = {
        (each.__qualname__, name) for each in seen for name in each.__annotations__.keys() & each.model_fields
    }
    return len(own)


def measured() -> dict[str, float]:
    """Return all figures by name."""
    product, tests = modules("src"), modules("tests")
    sizes = [lines_of(path) for path in product]
    lengths = [length for path in product for length in functions(path)]
    exceptions = tomllib.loads((ROOT / "tests" / "tidy.toml").read_text("utf-8"))
    return {
        "product_lines": sum(sizes),
        "product_modules": len(product),
        "module_lines_median": statistics.median(sizes),
        "module_lines_max": max(sizes),
        "modules_too_long": sum(size > MODULE_LINES_MAX for size in sizes),
        "functions": len(lengths),
        "functions_too_long": sum(length > FUNCTION_LINES_MAX for length in lengths),
        "settings": settings(),
        "class_names_twice": sum(count > 1 for count in public_classes().values()),
        "exceptions": sum(len(each) for each in exceptions.values()),
        "tests_lines": sum(lines_of(path) for path in tests),
        "tests_to_product": round(sum(lines_of(path) for path in tests) / sum(sizes), 2),
    }


def main() -> int:
    """Print the figures; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    figures = measured()
    if parser.parse_args().json:
        print(json.dumps(figures))
        return 0
    for name, figure in figures.items():
        print(f"{name.replace('_', ' '):22} {figure:>10,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
