"""Fixtures live in `tests.support`; this file only names them."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests.support.examples import FAST, USUAL

pytest_plugins = [
    "tests.support.forked",
    "tests.support.in_memory",
    "tests.support.kafka_cluster",
    "tests.support.kafka_proxy",
    "tests.support.postgres",
    "tests.support.proxy",
    "tests.support.selection",
    "tests.support.spark_session",
    "tests.support.vitess.cluster",
    "tests.support.pipeline.shop",
    "tests.support.pipeline.repairs",  # after those that it imports
]

# Imports and collection create objects that stay: scanning them again and again takes a third of the time.
gc.disable()
# Nothing here multiplies matrices, and its threads spin for a while when they wait.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# As `tailrace.sources.vitess` does, which some tests import after gRPC: servers are started by forks, too.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# With Rich, which is installed, a logged traceback takes a tenth of a second.
for processor in structlog.get_config()["processors"]:
    if isinstance(processor, structlog.dev.ConsoleRenderer):
        processor.exception_formatter = structlog.dev.plain_traceback

# Every failure prints what reproduces it. No deadline: the first call of a kernel may load it
# from its cache, and two cores are shared.
settings.register_profile(
    "default",
    max_examples=USUAL,
    print_blob=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("fast", parent=settings.get_profile("default"), max_examples=FAST)
settings.load_profile("default")

# A test's Spark lives for a minute or two, in which Java's second compiler costs more than it returns:
# measured on two tests that start Spark ten times, 285 s of CPU with it and 162 s without.
QUICK_SPARK = "-XX:TieredStopAtLevel=1"
# Made by scripts/make_class_archive.py, which explains it.
if (archive := Path(__file__).parents[1] / ".cache" / "spark.jsa").exists():
    QUICK_SPARK += f" -XX:SharedArchiveFile={archive} -Xlog:disable -Xlog:all=error:stderr"
os.environ.setdefault("SPARK_SUBMIT_OPTS", QUICK_SPARK)


def pytest_configure(config: pytest.Config) -> None:
    """Choose how much hypothesis tries; end on SIGTERM as on Ctrl-C, so that servers are stopped."""
    # Otherwise libraries report what is left as leaks; after the last time that pytest collects garbage.
    config.add_cleanup(gc.unfreeze)
    if config.getoption("fast"):
        settings.load_profile("fast")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A shell starts background jobs with SIGINT ignored, and children inherit that: they would ignore the
    # Ctrl-C that tests send them.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """When files are handed out to workers, begin with those that have long tests, then slow ones, so that
    none is left for one worker at the end.
    """
    if hasattr(config, "workerinput"):
        of = {name: {i.path for i in items if i.get_closest_marker(name)} for name in ("ci", "slow")}
        items.sort(key=lambda item: (item.path not in of["ci"], item.path not in of["slow"]))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _logs_as_imported() -> None:
    """Forget how an earlier test's command configured logging: its level would hide what a test looks for."""
    structlog.reset_defaults()
