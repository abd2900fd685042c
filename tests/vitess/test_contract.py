"""Vitess as a type of source, checked against the contract of sources."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tailrace.config.source.vitess import VitessSource
from tailrace.sources.vitess.source import VitessSourceType
from tailrace.testing.conformance import check_source
from tailrace_servers.vitess import EmbeddedVitess

pytestmark = [pytest.mark.vitess, pytest.mark.ci]


def test_the_contract_of_sources_is_kept(tmp_path: Path, vitess: EmbeddedVitess, orders: str) -> None:
    numbers = itertools.count(1)

    def commit() -> int:
        vitess.execute(f"insert into {orders} (id) values ({next(numbers)}), ({next(numbers)})")
        return 2

    section = VitessSource(
        hosts=(vitess.address,),
        keyspace=vitess.keyspace,
        tables=(f"{vitess.keyspace}.{orders}",),
        snapshot="never",
        heartbeat_interval_s=1,
    )
    check_source(VitessSourceType(), section, tmp_path / "log", commit)
