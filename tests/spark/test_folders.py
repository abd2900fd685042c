"""Folders that all executors must see: the check of them leaves no files."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tailrace.spark.folders import require_shared
from tests.support.sinks.rig import InProcess

HOURS_AGO_S = 2 * 3600


class Cluster(InProcess):
    """A cluster with one executor, which is this process."""

    master = "spark://nowhere:7077"
    defaultParallelism = 1  # noqa: N815 - Spark's name

    @property
    def sparkContext(self) -> Cluster:  # noqa: N802 - Spark's name
        return self


def left(folder: Path, name: str, age_s: float) -> str:
    (folder / name).touch()
    os.utime(folder / name, (time.time() - age_s,) * 2)
    return name


def test_files_that_a_killed_process_left_are_removed_at_the_next_start(tmp_path: Path) -> None:
    for name in (".tailrace-probe-0123456789abcdef", ".tailrace-probe-0123456789abcdef-01234567"):
        left(tmp_path, name, HOURS_AGO_S)
    theirs = [
        left(tmp_path, ".tailrace-probe-fedcba9876543210", 10),  # another pipeline is just starting
        left(tmp_path, ".tailrace-probe-notes", HOURS_AGO_S),
        left(tmp_path, "part-0.parquet", HOURS_AGO_S),
    ]
    require_shared(Cluster(), {"the sink": tmp_path})  # type: ignore[arg-type]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(theirs)
