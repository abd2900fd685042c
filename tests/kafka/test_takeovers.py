"""The same pipeline twice: refused where that is possible, fenced elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace_servers.kafka import EmbeddedKafka
from tests.support.postgres import Database
from tests.support.torture.harness import Round
from tests.support.torture.takeovers import Relay
from tests.support.torture.topics import Topics
from tests.support.wait import wait_until

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def make_round(kafka: EmbeddedKafka, pg: Database, request: pytest.FixtureRequest) -> Callable[[Path], Round]:
    def make(root: Path) -> Round:
        round_ = Round(root, pg, ["kafka"], seed=3, topics=Topics(kafka.bootstrap, pg.name), pause_s=0.2)
        request.addfinalizer(round_.close)
        round_.write_file()
        return round_

    return make


@pytest.mark.parametrize(
    "takeovers", [3, pytest.param(100, marks=[pytest.mark.torture, pytest.mark.timeout(3600)])]
)
@pytest.mark.ci
def test_an_engine_that_goes_on_after_a_takeover_commits_nothing_and_reports_why(
    make_round: Callable[[Path], Round], tmp_path: Path, takeovers: int
) -> None:
    round_ = make_round(tmp_path)
    relay = Relay(round_)
    with round_.at_work(None):
        relay.begin()
        for _ in range(takeovers):
            assert relay.hand_over() == []
    relay.lives[-1].kill()
    assert round_.disagreements() == []
    assert round_.judge() == []


@pytest.mark.ci
def test_a_second_start_is_refused_and_the_first_goes_on(
    make_round: Callable[[Path], Round], tmp_path: Path
) -> None:
    round_ = make_round(tmp_path / "first")
    relay = Relay(round_)
    with round_.at_work(None):
        relay.begin()
        (first,) = relay.lives
        # On the same log.
        second = round_.live(until_caught_up=False, output=tmp_path / "second.out")
        assert second.wait() == 1
        assert "log_locked" in second.last_words()
        # As if on another machine: the same file, with another log.
        file, theirs = round_.file, tmp_path / "elsewhere.yaml"
        theirs.write_text(file.read_text().replace(str(round_.log), str(tmp_path / "other-log")))
        done = round_.command("run", str(theirs), "--until-caught-up")
        assert done.returncode == 1
        assert "slot_foreign" in done.stderr, done.stderr
        # Also one with another slot: it starts as far as the sink, and fences nothing.
        theirs.write_text(
            file.read_text()
            .replace(str(round_.log), str(tmp_path / "third-log"))
            .replace("type: postgresql", "type: postgresql\n  slot: of_its_own")
        )
        done = round_.command("run", str(theirs), "--until-caught-up")
        assert done.returncode == 1
        assert "sink_foreign" in done.stderr, done.stderr
        before = relay.offset()
        wait_until(lambda: (relay.offset() or 0) > (before or 0), 120, "the first engine to go on")
        assert not first.is_over, first.last_words()
        assert first.end() == 0, first.last_words()
    assert round_.disagreements() == []
