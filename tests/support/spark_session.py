"""One SparkSession for the whole test run: starting one costs seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session on two local cores, with the source `tailrace` and Delta at hand."""
    from tailrace.config import SparkConfig
    from tailrace.spark.session import session

    conf = {
        # Tables of a few rows: to generate and compile code for each query takes a fifth of Java's CPU. The
        # pipelines that tests start in processes of their own do as users' do.
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.shuffle.partitions": "1",
        "spark.databricks.delta.snapshotPartitions": "1",
        # Functions of tests that are sent to executors come from modules of tests.
        "spark.executorEnv.PYTHONPATH": str(Path(__file__).parents[2]),
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
    }
    started = session(SparkConfig(master="local[2]", conf=conf), "tests")  # type: ignore[arg-type]
    yield started
    started.stop()
