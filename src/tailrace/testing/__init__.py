"""Tools for those who test what they build on the engine, or for it: sources, clocks, conformance."""

from __future__ import annotations

from tailrace.testing.engine import MovableClock, TestingEngine
from tailrace.testing.source import Fault, LinesSource

__all__ = ["Fault", "LinesSource", "MovableClock", "TestingEngine"]
