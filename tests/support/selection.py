"""Chooses and orders tests: `--fast`, `--shuffle SEED`."""

from __future__ import annotations

import os
import random

import pytest

#: Tests with one of these fixtures use a server or Spark.
_OF_SERVERS = frozenset({"servers", "postgres_version", "authority", "kafka", "secured", "spark", "tls_pg"})


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tailrace")
    group.addoption("--fast", action="store_true", help="only tests that start no server and are quick")
    group.addoption(
        "--shuffle", metavar="SEED", type=int, help="run the tests in a random order, 0: of any seed"
    )


def pytest_configure(config: pytest.Config) -> None:
    # xdist's workers start later and get the seed from the environment: their order must be the same.
    if config.option.shuffle == 0:
        chosen = os.environ.setdefault("TAILRACE_SHUFFLE", str(random.randrange(1, 1 << 32)))
        config.option.shuffle = int(chosen)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if (seed := config.option.shuffle) is not None:
        terminalreporter.write_line(f"order: --shuffle {seed}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.fast:
        config.hook.pytest_deselected(items=[item for item in items if not _is_fast(item)])
        items[:] = [item for item in items if _is_fast(item)]
    if (seed := config.option.shuffle) is not None:
        random.Random(seed).shuffle(items)


def _is_fast(item: pytest.Item) -> bool:
    needs = _OF_SERVERS & set(getattr(item, "fixturenames", ()))
    return not needs and not any(item.get_closest_marker(name) for name in ("slow", "ci", "torture"))
