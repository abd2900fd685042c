"""A pipeline with the workload of the torture, for faults that are tested one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.postgres import Database
from tests.support.torture.harness import Round


@pytest.fixture
def make_round(tmp_path: Path) -> Iterator[Callable[..., Round]]:
    """Makes rounds: `make_round(database, *sinks, **options)`; without sinks Spark is not started."""
    with ExitStack() as stack:

        def make(database: Database, *sinks: str, **options: object) -> Round:
            round_ = Round(tmp_path / f"round-{database.name}", database, sinks, seed=11, **options)  # type: ignore[arg-type]
            stack.callback(round_.close)
            round_.write_file()
            return round_

        yield make
