"""Reshards of a real keyspace at random, under a writer, with everything killed at any moment."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tailrace_servers.kafka import EmbeddedKafka
from tests.support.torture.vitess import SHARDS_MAX, campaign, planned, shards_between

#: Of the torture.
CAMPAIGNS = 30


def test_plans_are_of_shards_that_have_the_same_keys() -> None:
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
def test_positions_that_belong_to_tasks_are_caught(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="jsonl"):
        campaign(tmp_path, seed=1, steps=1, launcher="vitess_state_by_task")
