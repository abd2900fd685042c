"""Two engines on one log: the second is refused at once, the first is not disturbed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests.support.postgres import Database
from tests.support.torture.harness import Round
from tests.support.wait import wait_until


def _is_streaming(round_: Round) -> bool:
    return '"streaming"' in round_.command("status", str(round_.file), "--json").stdout


@pytest.mark.follows("log_locked")
@pytest.mark.parametrize("paused", [False, True], ids=["running", "paused"])
def test_a_second_engine_is_refused_by_name_while_the_first_lives(
    paused: bool, pg: Database, make_round: Callable[..., Round]
) -> None:
    # GIVEN an engine at work, or paused, which is not the same as dead
    round_ = make_round(pg)
    first = round_.live(until_caught_up=False)
    wait_until(lambda: _is_streaming(round_), 60)
    with round_.at_work() as workload:
        wait_until(lambda: workload.committed > 20, 60)
        if paused:
            os.kill(first.pid, signal.SIGSTOP)
        # WHEN another one is started on its log
        second = round_.command("run", str(round_.file), "--until-caught-up")
        if paused:
            os.kill(first.pid, signal.SIGCONT)
    # THEN that one reports why it does not run, in one message without a traceback
    assert second.returncode == 1
    assert "log_locked" in second.stderr
    assert "stop the other" in second.stderr
    assert "Traceback" not in second.stderr
    # AND the first one goes on and ends normally
    assert first.end() == 0, first.last_words()
    assert round_.live().wait() == 0
    assert round_.judge_log() == []
