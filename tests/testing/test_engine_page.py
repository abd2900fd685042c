"""The programs on the page of the engine work as described."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tailrace.testing import conformance
from tests.support.engines import engine_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "engine.md"


def program(word: str) -> dict:
    """Run the block of the page with this word in it, and return its names."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if word in block]
    names: dict = {}
    exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102 - our own page
    return names


@pytest.fixture
def folder(tmp_path):
    for name, count in {"a": 3, "b": 2500, "c": 0}.items():
        (tmp_path / name).write_text("".join(f"{name} {number}\n" for number in range(count)))
    return tmp_path


def test_the_connector_of_files_reads_files_and_fulfils_the_contract(folder):
    connector = program("class FilesConnector")["FilesConnector"]
    settings, got = {"folder": str(folder)}, []
    engine_of(connector, lambda r: got.append(r.after["line"]), settings=settings, tasks_max=2).run()
    assert sorted(got) == sorted([f"a {n}" for n in range(3)] + [f"b {n}" for n in range(2500)])
    assert [line for line in got if line[0] == "b"] == [f"b {n}" for n in range(2500)]
    conformance.check_connector(connector, settings, tasks_max=2)
    task = program("class FilesConnector")["FilesTask"]
    conformance.check_task(task, {"paths": [str(folder / "b")]}, records=2500)


def test_the_test_on_the_page_passes():
    program("test_nothing_is_lost_when_polls_fail")["test_nothing_is_lost_when_polls_fail"]()
