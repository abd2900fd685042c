"""Checks the examples and lists of docs/transformations.md."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tailrace.config.transformations.options import TRANSFORMATIONS
from tailrace.config.transformations.predicates import PREDICATES
from tailrace.config.transformations.steps import METADATA
from tailrace.expressions.language import FUNCTIONS
from tailrace.records.record import Record
from tailrace.transforms.factory import build
from tests.support.transforms.groups import applied, orders, rows
from tests.support.transforms.page_examples import EXAMPLES, PAGE


@pytest.mark.parametrize("text", EXAMPLES)
def test_every_example_makes_a_chain(text: str) -> None:
    content = yaml.safe_load(text)
    engine = content.get("engine", content) if isinstance(content, dict) else {"transformations": content}
    assert len(build(engine["transformations"], engine.get("predicates"))) == len(engine["transformations"])


def test_every_transformation_is_on_the_page() -> None:
    for name in [*TRANSFORMATIONS, *PREDICATES]:
        assert f"`{name}`" in PAGE, name
    for function in FUNCTIONS:
        assert f"`{function}" in PAGE, function
    for name in METADATA:
        assert f"`{name}`" in PAGE, name


def test_the_pages_transformation_in_python_works() -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    found: dict[str, Any] = {}
    exec(compile(code, "transformations.md", "exec", dont_inherit=True), found)  # noqa: S102 - it is the page's own
    group = orders()
    [made] = applied(group, found["Shout"]())
    assert [row["headers"] for row in rows([made]).values()] == [{"loud": "yes"}] * 4
    assert made.wire is not None
    assert found["Record"] is Record
