"""Checks that the driver and all executors share folders: the log's, and those that sinks write to."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.errors import Kind, TailraceError
from tailrace.spark.java import cores_of
from tailrace.spark.jobs import on_every_core

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Shortest duration of a task, in seconds: an executor whose task ended at once could run all of them.
_TASK_S = 0.3

#: Prefix of the driver's files; an executor's file has the driver's name as its prefix.
_PREFIX = ".tailrace-probe-"
_PROBE = re.compile(rf"{re.escape(_PREFIX)}[0-9a-f]{{16}}(-[0-9a-f]{{8}})?")
_OLD_S = 3600.0

_HINT = (
    "mount one file system under this path on the driver and on every executor, with the same user, "
    "or run Spark on one machine: spark.master: local[*]"
)


def require_shared(session: SparkSession, folders: Mapping[str, Path]) -> None:
    """Check that the executors of a cluster see these folders as the driver does, and may write there.

    The driver creates a hidden file in each folder for the duration of the check. Executors that join the
    cluster later are not checked. Does nothing if executors are threads of this process.

    :param folders: existing folders by the setting that names them, such as `log.path`.
    :raises TailraceError: `ENVIRONMENT_UNFIT` with host and folder; `SPARK_FAILED`.
    """
    context = session.sparkContext
    if cores_of(context.master or "") is not None:
        return
    with contextlib.ExitStack() as stack:
        probes = [(use, stack.enter_context(_probe(folder))) for use, folder in folders.items()]
        found = on_every_core(session, partial(_look, probes))
    for host, use, folder, problem in sorted(found):
        raise not_shared(host, use, folder, problem)


def not_shared(host: str, use: str, folder: str, problem: str) -> TailraceError:
    """Return the error of an executor on `host` that does not share a folder with the driver."""
    return TailraceError(
        Kind.ENVIRONMENT_UNFIT,
        f"use {use} on the Spark executor on {host}: {folder}: {problem}",
        _HINT,
        {"host": host, "path": folder},
    )


@contextlib.contextmanager
def _probe(folder: Path) -> Iterator[str]:
    _remove_old(folder)
    file = folder / f"{_PREFIX}{secrets.token_hex(8)}"
    file.touch(mode=0o600)
    try:
        yield str(file)
    finally:
        file.unlink(missing_ok=True)


def _remove_old(folder: Path) -> None:
    """Remove files left by killed processes: those older than any check that may still run."""
    for file in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if _PROBE.fullmatch(file.name) and file.stat().st_mtime < time.time() - _OLD_S:
                file.unlink()


def _look(probes: Sequence[tuple[str, str]], _: Iterable[int]) -> Iterator[tuple[str, str, str, str]]:
    """Yield the problems on this executor: host, use, folder, problem."""
    began_s = time.monotonic()
    for use, probe in probes:
        folder, name = os.path.split(probe)
        if problem := _problem(folder, name):
            yield socket.gethostname(), use, folder, problem
    time.sleep(max(0.0, _TASK_S - (time.monotonic() - began_s)))


def _problem(folder: str, name: str) -> str:
    if not os.path.isdir(folder):
        return "the folder does not exist"
    if not os.path.exists(os.path.join(folder, name)):
        return "this is not the driver's folder, although it has the same path"
    own = os.path.join(folder, f"{name}-{secrets.token_hex(4)}")
    try:
        os.close(os.open(own, os.O_CREAT | os.O_EXCL, 0o600))
        os.unlink(own)
    except OSError as error:
        return f"the folder is not writable: {error.strerror}"
    return ""
