"""The files that the docs call caches or hints may be deleted: the sinks' own records decide."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.postgres import Database
from tests.support.torture.harness import Round, kill_at
from tests.support.wait import wait_until

#: Caches and hints below a pipeline's directories. Not among them: the records of a file sink's commits
#: (`manifests`), and what identifies a target's data (`identity.json`).
HINTS = ("log/status.json", "log/readers", "*/_tailrace/position-*.json", "*/_tailrace/staging")


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_positions_hints_and_incomplete_files_may_be_deleted(
    pg: Database, make_round: Callable[..., Round]
) -> None:
    round_ = make_round(pg, "delta", "mirror", "parquet", "jsonl")
    assert round_.undergo(kill_at("sink.before_position", 3))
    deleted = [path for pattern in HINTS for path in round_.root.glob(pattern) if _delete(path)]
    assert any("position-" in path.name for path in deleted), "there must be a hint to delete"
    assert round_.judge() == []


def _delete(path: Path) -> bool:
    # Workers of the killed process may write a last file meanwhile.
    wait_until(lambda: _is_gone(path), 60)
    return True


def _is_gone(path: Path) -> bool:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    return not path.exists()
