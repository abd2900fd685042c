"""A small torture run: every failpoint and every other fault once, on all sinks at once.

`make torture` does the same a hundred times for each sink.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tailrace_servers.postgres import EmbeddedPostgres
from tests.support.postgres import Database
from tests.support.proxy import Proxy
from tests.support.torture import disk
from tests.support.torture.harness import (
    POINTS,
    SINKS,
    Round,
    cut_connection,
    fill_disk,
    kill_at,
    kill_at_random,
    kill_source,
)

pytestmark = pytest.mark.timeout(900)

#: Failpoints that are passed without Spark, in an order in which a run passes them. After a snapshot was
#: interrupted after its first chunk, the rest is read beside the stream; the hand-over after an
#: uninterrupted one needs another log: the second test and tests/capture have it.
CAPTURE_POINTS = (
    "snapshot.after_slot",
    "snapshot.after_plan",
    "snapshot.in_copy",
    "snapshot.before_chunk_end",
    "snapshot.after_chunk",
    "snapshot.before_window",
    "snapshot.in_window",
    "snapshot.after_window",
    "snapshot.before_finish",
    *sorted(name for name in POINTS if name.startswith(("capture.", "log.")) and "retention" not in name),
)
HANDOVER_POINTS = ("snapshot.before_handover", "snapshot.after_handover")
SINK_POINTS = tuple(sorted(name for name in POINTS if name.startswith("sink.")))
#: Retention finds segments to remove once the sinks have read a part of the log in earlier processes.
RETENTION_POINTS = tuple(sorted(name for name in POINTS if "retention" in name))


@pytest.fixture
def round_(own_pg: EmbeddedPostgres, tmp_path: Path, proxy: Callable[[int], Proxy]) -> Iterator[Round]:
    own_pg.create_database("shop")
    with ExitStack() as stack:
        small = stack.enter_context(disk.small_disk(tmp_path / "disk", 96)) if disk.can_mount() else None
        round_ = Round(
            tmp_path, Database(own_pg, "shop"), list(SINKS), seed=20_261, proxy=proxy(own_pg.port), disk=small
        )
        stack.callback(round_.close)
        yield round_


@pytest.mark.torture
def test_a_kill_at_each_failpoint_loses_repeats_and_splits_no_transaction(round_: Round) -> None:
    round_.settings["source"] = {"snapshot_chunk_rows": 30}
    round_.write_file(sinks=[])
    missed = [name for name in CAPTURE_POINTS if not round_.undergo(kill_at(name))]
    round_.settings["log"] = {"retention": {"size_bytes": 1 << 20}}
    round_.write_file()
    # Which sink reaches a failpoint first is chance; later visits are by other sinks.
    faults = [kill_at(name, 1 + turn % 3) for turn, name in enumerate(SINK_POINTS)]
    faults += [kill_at(name, until_caught_up=False) for name in RETENTION_POINTS]
    missed += [fault.name for fault in faults if not round_.undergo(fault)]
    assert round_.judge() == []
    assert missed == []
    assert set(round_.hits()) == POINTS - {*HANDOVER_POINTS}


@pytest.mark.ci
def test_random_kills_a_killed_source_cut_connections_and_a_full_disk_lose_nothing(round_: Round) -> None:
    round_.write_file(sinks=[])
    assert kill_at("snapshot.before_handover").strike(round_)
    round_.write_file()
    faults = [kill_at_random(12), kill_source(12), cut_connection(10)]
    faults += [fill_disk(10)] if round_.disk else []
    for fault in faults:
        assert round_.undergo(fault)
    assert round_.judge() == []
