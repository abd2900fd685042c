"""Requires Debezium's engine for tests that compare with it."""

from __future__ import annotations

import os

import pytest

from tailrace_bench.support import debezium


def require_debezium() -> None:
    """Skip the test if Debezium's engine was not fetched; under CI fail it."""
    if debezium.is_here():
        return
    if os.environ.get("CI"):
        pytest.fail("Debezium was not fetched: make bench-peers", pytrace=False)
    pytest.skip("Debezium was not fetched: make bench-peers")
