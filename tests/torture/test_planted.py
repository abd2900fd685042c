"""The harness finds bugs: it fails with each planted bug and passes without.

Each bug breaks one rule of durability on purpose, from outside: see `planted/`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from tests.support.postgres import Database
from tests.support.torture.harness import Round, kill_at, lose_power

pytestmark = [pytest.mark.torture, pytest.mark.timeout(300)]


@pytest.fixture
def make_round(pg: Database, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], Round]:
    def make(launcher: str | None, *sinks: str) -> Round:
        round_ = Round(tmp_path, pg, sinks or ["jsonl"], seed=7, launcher=launcher)
        request.addfinalizer(round_.close)
        round_.write_file(sinks=[])
        return round_

    return make


def _run_and_lose_power(round_: Round, lives: int = 4) -> None:
    for _ in range(lives):
        assert round_.undergo(lose_power(8))


def test_power_loss_on_a_slow_disk_loses_nothing(make_round: Callable[[str], Round]) -> None:
    round_ = make_round("slow_disk")
    _run_and_lose_power(round_)
    round_.launcher = None
    assert round_.judge() == []


def test_acknowledging_before_fsync_is_caught_by_the_validator(make_round: Callable[[str], Round]) -> None:
    round_ = make_round("acknowledge_early")
    _run_and_lose_power(round_, 6)
    problems = round_.judge()
    assert any("transactions, but the last one is number" in problem for problem in problems), problems


def test_acknowledging_before_fsync_is_noticed_at_the_next_start(make_round: Callable[[str], Round]) -> None:
    round_ = make_round("acknowledge_early")
    for _ in range(12):  # by chance the disk may have kept all that was acknowledged
        round_.launcher = "acknowledge_early"
        _run_and_lose_power(round_, 1)
        round_.launcher = None
        if (life := round_.live()).wait() != 0:
            assert "slot_ahead_of_log" in life.last_words()
            return
    pytest.fail("no process lost anything that was acknowledged")


@pytest.mark.parametrize("launcher", ["resume_inclusive", None])
def test_resuming_with_a_comparison_off_by_one_is_caught(
    launcher: str | None, make_round: Callable[[str | None], Round]
) -> None:
    round_ = make_round(launcher)
    assert round_.live().wait() == 0
    for attempt in range(3):
        # GIVEN a transaction that commits only after another one has committed
        with psycopg.connect(round_.database.dsn) as late, psycopg.connect(round_.database.dsn) as early:
            late.execute("insert into marker values (91, %s, 1)", (attempt,))
            early.execute("insert into marker values (90, %s, 1)", (attempt,))
            early.commit()
            # AND a log that ends with that other transaction
            assert round_.live().wait() == 0
        # WHEN the first one's commit follows at once (leaving `with` commits)
        assert round_.live().wait() == 0
    # THEN the sink has it, or else the validator says what is missing
    problems = round_.judge()
    assert bool(problems) is (launcher is not None), problems
    assert all("writer 91" in problem or "marker" in problem for problem in problems)


def test_a_tail_that_recovery_does_not_cut_off_is_caught(make_round: Callable[[str], Round]) -> None:
    round_ = make_round("tail_kept")
    assert round_.live().wait() == 0
    # GIVEN a log that ends in the middle of a large transaction
    with psycopg.connect(round_.database.dsn) as connection:
        rows = connection.execute(
            "insert into scratch (writer, v) select 90, repeat('x', 200) from generate_series(1, 50000)"
        ).rowcount
        connection.execute("insert into marker values (90, 0, %s)", (rows + 1,))
    assert kill_at("capture.after_append", 3).strike(round_)
    # WHEN recovery keeps what follows the last boundary
    # THEN the validator finds twice what the source sent again, unless the decoder first finds one
    # transaction begin inside another: which of the two depends on where the log ends
    try:
        problems = round_.judge()
    except AssertionError as refused:
        problems = [str(refused)]
    assert any("times" in text or "begins inside another" in text for text in problems), problems


def test_a_position_recorded_in_a_second_step_is_caught(make_round: Callable[..., Round]) -> None:
    round_ = make_round("position_later", "parquet")
    round_.write_file()
    for _ in range(2):
        assert round_.undergo(kill_at("sink.before_commit"))
    problems = round_.judge()
    assert any("times" in problem for problem in problems), problems
