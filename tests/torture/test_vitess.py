"""Random reshards of a real keyspace while a writer runs and processes are killed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tailrace_servers.kafka import EmbeddedKafka
from tests.support.torture.vitess import SHARDS_MAX, campaign, planned, shards_between

#: For `make torture`.
CAMPAIGNS = 30


def test_planned_reshards_keep_the_keyspace_covered() -> None:
    for seed in range(200):
        serving = set(shards_between(["80"]))
        for step in planned(random.Random(seed), 5):
            assert set(step.sources) <= serving
            serving = serving - set(step.sources) | set(step.targets)
            cuts = sorted(shard.partition("-")[2] for shard in serving)[1:]
            assert serving == set(shards_between(cuts))
            assert len(serving) <= SHARDS_MAX


@pytest.mark.vitess
def test_a_random_campaign_loses_no_change(tmp_path: Path) -> None:
    assert campaign(tmp_path, seed=1, steps=2) >= 1


@pytest.mark.torture
@pytest.mark.vitess
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(2, 2 + CAMPAIGNS))
def test_random_campaigns_lose_no_change(tmp_path: Path, kafka: EmbeddedKafka, seed: int) -> None:
    assert campaign(tmp_path, seed, kafka=kafka.bootstrap) >= 1


@pytest.mark.torture
@pytest.mark.vitess
def test_positions_recorded_by_task_instead_of_by_shard_are_caught(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="jsonl"):
        campaign(tmp_path, seed=1, steps=1, launcher="vitess_state_by_task")
