"""Tools for tests of programs that use or extend the engine: a source, a clock, conformance checks."""

from __future__ import annotations

from tailrace.testing.engine import MovableClock, TestingEngine
from tailrace.testing.source import Fault, LinesSource

__all__ = ["Fault", "LinesSource", "MovableClock", "TestingEngine"]
