"""Converters are found by name, ours and those of other packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailrace.converters.debezium import JsonConverter
from tailrace.converters.factory import build
from tailrace.errors import Kind, TailraceError

PACKAGE = """
class Upper:
    def __init__(self, *, width):
        self.width = int(width)

    def convert(self, group):
        return group

    def close(self):
        pass
"""


@pytest.fixture
def _third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tailrace_converters.py").write_text(PACKAGE)
    info = tmp_path / "tailrace_converters-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tailrace-converters\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tailrace.converters]\nupper = tailrace_converters:Upper\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("_third_party")
def test_a_converter_gets_its_options_and_unknown_ones_are_refused() -> None:
    assert isinstance(build("json", {"schemas_enable": False}), JsonConverter)
    made = build("upper", {"width": "3"})
    assert type(made).__name__ == "Upper"
    cases: list[tuple[str, dict[str, Any]]] = [
        ("json", {"schema": 1}),
        ("upper", {}),
        ("upper", {"width": "s3cret"}),
    ]
    for name, options in cases:
        with pytest.raises(TailraceError, match=f"create the converter '{name}'") as caught:
            build(name, options)
        assert caught.value.kind is Kind.CONFIG_INVALID
        assert "s3cret" not in str(caught.value)
    with pytest.raises(TailraceError, match="did you mean 'json'"):
        build("jsn", {})
