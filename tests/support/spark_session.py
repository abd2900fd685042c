"""One SparkSession for the whole test run: starting one costs seconds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.spark_workers import sitecustomize


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session on two local cores, with the source `tailrace` and Delta."""
    from tailrace.config import SparkConfig
    from tailrace.spark.session import session

    conf = {
        # Tables have a few rows: compiling code for each query would take a fifth of Java's CPU time. The
        # pipelines that tests start in other processes have Spark's usual settings.
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.shuffle.partitions": "1",
        "spark.databricks.delta.snapshotPartitions": "1",
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
    }
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", os.pathsep.join(sitecustomize.PATHS))
        started = session(SparkConfig(master="local[2]", conf=conf), "tests")  # type: ignore[arg-type]
    yield started
    started.stop()
