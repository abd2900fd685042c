"""The clock for tests, the source of lines, and public names."""

from __future__ import annotations

import functools
import importlib
import re
import subprocess
import sys
import threading

import pytest

import tailrace
from tailrace import extensions, failpoints
from tailrace.engine.contracts import RetriableError
from tailrace.errors import Kind, TailraceError
from tailrace.testing import Fault, LinesSource, MovableClock
from tests.support.engines import Seen, Store, engine_of
from tests.support.wait import wait_until


def test_a_clock_stands_still_until_it_is_moved():
    clock = MovableClock(time_us=5_000_000)
    event, waited = threading.Event(), []
    waiting = threading.Thread(target=lambda: waited.append(clock.wait(event, 10)))
    waiting.start()
    assert clock.wait_for_waiters()
    clock.advance(9.999)
    assert waiting.is_alive()
    clock.advance(0.001)
    waiting.join(30)
    assert waited == [False]
    assert (clock.monotonic(), clock.time_us()) == (10, 15_000_000)
    event.set()
    assert clock.wait(event, 1e9)
    with pytest.raises(ValueError, match="go back"):
        clock.advance(-1)
    assert not clock.wait_for_waiters(timeout_s=0.01)


def test_back_off_uses_the_clock():
    clock, seen = MovableClock(), Seen()
    source = LinesSource(faults=[Fault("poll", at, error=RetriableError()) for at in (1, 2)])
    options = {"errors_retry_delay_initial_ms": 3_600_000, "errors_retry_delay_max_ms": 3_600_000}
    engine = engine_of(source, seen.record, clock=clock, options=options)
    engine.start()
    for polls in (1, 2):
        wait_until(functools.partial(lambda polls: source.count("poll") == polls, polls), 60)
        assert clock.wait_for_waiters()
        clock.advance(3600)
    assert engine.wait(60)
    assert seen.count == 10


def test_the_source_of_lines_has_the_given_transactions_and_partitions():
    ends, seen = [], Seen()

    def handle(batch):
        seen.batch(batch)
        ends.extend(batch.transaction_ends.tolist())

    engine_of(LinesSource(8, partitions=2, batch=3, transaction=4), on_batch=handle).run()
    assert seen.lines == {"0-0": list(range(1, 9)), "0-1": list(range(1, 9))}
    assert sum(ends) == 4


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, tailrace; print(*[m for m in sys.modules if m.startswith(('tailrace.', 'pyarrow'))])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "\n"


def test_public_names_exist():
    for name in tailrace.__all__:
        assert getattr(tailrace, name) is not None
        assert name in dir(tailrace)
    with pytest.raises(AttributeError):
        _ = tailrace.Nothing


def test_an_engine_fails_at_an_armed_failpoint():
    try:
        failpoints.arm("engine.after_poll=error@2")
        seen, store = Seen(), Store()
        with pytest.raises(TailraceError, match="FailpointError"):
            engine_of(LinesSource(30), seen.record, offsets=store).run()
        assert store.line() == seen.count == 10
        failpoints.arm("engine.before_commit=error@1")
        engine_of(LinesSource(30), seen.record, offsets=store).run()
        assert store.line() == 30
    finally:
        failpoints.arm("")


PACKAGE = """
from tailrace.testing import LinesSource

class Lines(LinesSource):
    def __init__(self):
        super().__init__(5)

class NoConnector:
    pass

number = 5
"""

ENTRIES = """[tailrace.connectors]
lines = tailrace_thirdparty:Lines
nothing = tailrace_thirdparty:NoConnector
number = tailrace_thirdparty:number
missing = tailrace_thirdparty:Missing
far = tailrace_no_such_package.inner:Lines
"""


@pytest.fixture
def third_party(tmp_path, monkeypatch):
    """A third party's package that registers connectors."""
    (tmp_path / "tailrace_thirdparty.py").write_text(PACKAGE)
    info = tmp_path / "tailrace_thirdparty-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tailrace-thirdparty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [each for each in sys.modules if each.startswith(("tailrace_third", "tailrace_no_such"))]:
        del sys.modules[name]  # otherwise the next test would find them


@pytest.mark.usefixtures("third_party")
def test_a_third_partys_connector_is_found_by_its_name():
    seen = Seen()
    engine_of("lines", seen.record).run()
    assert seen.lines == {"0-0": [1, 2, 3, 4, 5]}
    assert "lines" in extensions.names(extensions.CONNECTORS)


@pytest.mark.usefixtures("third_party")
@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("line", Kind.CONFIG_INVALID, "did you mean 'lines'?"),
        ("nothing", Kind.CONFIG_INVALID, "is not a connector, it has no start, task_settings"),
        ("number", Kind.CONFIG_INVALID, "it can't be called"),
        ("missing", Kind.ENVIRONMENT_UNFIT, "raised AttributeError"),
        ("far", Kind.ENVIRONMENT_UNFIT, "there is no module 'tailrace_no_such_package'"),
    ],
)
def test_problems_of_a_third_partys_connector_are_reported(name, kind, words):
    with pytest.raises(TailraceError) as caught:
        engine_of(name, Seen().record)
    assert caught.value.kind is kind
    assert words in str(caught.value)


@pytest.mark.usefixtures("third_party")
@pytest.mark.follows("environment_unfit")
def test_the_hint_for_a_missing_package_of_a_connector_installs_it(tmp_path):
    with pytest.raises(TailraceError) as caught:
        engine_of("far", Seen().record)
    found = re.search(r"install the package that has '(\w+)'", caught.value.hint)
    package = tmp_path / found[1]
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "inner.py").write_text("from tailrace_thirdparty import Lines\n")
    importlib.invalidate_caches()
    seen = Seen()
    engine_of("far", seen.record).run()
    assert seen.lines == {"0-0": [1, 2, 3, 4, 5]}
