"""The server ends while streaming, in each way that servers do, and starts again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tailrace_servers.postgres import EmbeddedPostgres
from tests.support.postgres import Database
from tests.support.torture.harness import Round
from tests.support.wait import wait_until


@pytest.mark.parametrize("way", ["fast", "immediate", "kill"])
def test_the_pipeline_survives_a_restart_of_its_server(
    way: str, own_pg: EmbeddedPostgres, make_round: Callable[..., Round]
) -> None:
    own_pg.create_database("shop")
    round_ = make_round(Database(own_pg, "shop"))
    life = round_.live(until_caught_up=False)
    with round_.at_work(transactions=None) as workload:
        wait_until(lambda: round_.hits()["snapshot.after_handover"] > 0, 120, "the stream")
        for _ in range(2):
            before = workload.committed
            wait_until(lambda: workload.committed > before + 50, 60)  # noqa: B023
            if way == "kill":
                own_pg.kill()
            else:
                # A fast stop waits until the walsender's client has everything: it must not hang.
                own_pg.stop("fast" if way == "fast" else "immediate", timeout_s=20)
            assert not life.is_over, life.last_words()
            own_pg.start()
    assert life.end() == 0, life.last_words()
    assert round_.live().wait() == 0
    assert round_.judge_log() == []
