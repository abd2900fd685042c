"""`tailrace realtime` without a running engine: the command applies at the next start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.changelog.retention.readers import Readers
from tailrace.changelog.writer import LogWriter
from tailrace.cli.main import app
from tailrace.realtime import control
from tests.support.changelog.frames_of import Source, append, new_log


@pytest.fixture
def file(tmp_path: Path) -> Path:
    log = new_log(tmp_path / "log")
    with LogWriter.open(log, "0") as writer:
        append(writer, Source().transaction(1))
    Readers(log).register("engine:shop", {"0": 0})
    file = tmp_path / "shop.yaml"
    file.write_text(
        "name: shop\n"
        'source: {type: postgresql, dsn: "postgresql://nobody@127.0.0.1:1/none", connect_timeout: 2}\n'
        "log: {path: ./log}\n"
        "realtime: on\n"
        "sinks: [{type: jsonl, path: ./lake, name: lake}]\n"
    )
    return file


def _run(*arguments: object, status: int = 0) -> str:
    done = CliRunner().invoke(app, ["realtime", *map(str, arguments)])
    assert done.exit_code == status, done.output
    return done.output


def _wanted(file: Path) -> dict[str, bool]:
    found = json.loads(_run("status", file, "--json"))["consumers"]
    assert {each["mode"] for each in found} == {"off"}
    return {each["consumer"]: each["wanted"] for each in found}


def test_a_command_applies_until_the_next_one_and_overrides_the_file(file: Path) -> None:
    assert _wanted(file) == {"engine:shop": True, "lake": True}
    assert "real time off for engine:shop, lake" in _run("off", file)
    assert _wanted(file) == {"engine:shop": False, "lake": False}
    said = json.loads(_run("on", file, "--consumer", "lake", "--json"))
    assert said == {"consumers": [{"source": "", "consumer": "lake", "wanted": True}]}
    assert _wanted(file) == {"engine:shop": False, "lake": True}
    assert "lake: off (no engine runs), wanted on, at 0" in _run("status", file)


def test_a_fall_back_is_shown_until_the_next_command(file: Path) -> None:
    directory = LogDirectory.open(file.parent / "log")
    control.keep(directory, "lake", control.KeptState(position=9, fell_back=True))
    waits = "lake: off (no engine runs; it fell back before, and waits for a command), wanted on, at 9"
    assert waits in _run("status", file)
    _run("on", file)
    assert "lake: off (no engine runs), wanted on, at 9" in _run("status", file)


def test_without_an_engine_the_position_is_what_the_consumer_has_recorded(file: Path) -> None:
    assert "engine:shop: off (no engine runs), wanted on, at 0" in _run("status", file)
    Readers.open(file.parent / "log").commit("engine:shop", "0", 7)
    assert "engine:shop: off (no engine runs), wanted on, at 7" in _run("status", file)
    file.write_text(f"{file.read_text()}spark: {{start: when_needed}}\n")
    run = CliRunner().invoke(app, ["replay", str(file), "--sink", "lake"])
    assert run.exit_code == 0, run.output
    end = LogReader.open(file.parent / "log", "0").end().offset
    assert f"lake: off (no engine runs), wanted on, at {end:,}" in _run("status", file)


def test_a_missing_consumer_is_refused_with_the_list_of_existing_ones(file: Path) -> None:
    assert "engine:shop, lake" in _run("on", file, "--consumer", "lakes", status=2)
