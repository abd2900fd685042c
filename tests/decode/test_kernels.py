"""Kernels are loaded, not compiled: a worker must not spend seconds before its first row."""

from __future__ import annotations

import subprocess
import sys

import pytest

COUNT = """
import importlib
from numba.core.dispatcher import Dispatcher
found = {}
for name in ("decode.envelope", "decode.gather",
             "decode.json.json_kernel", "decode.kernel",
             "decode.values.literals",
             "decode.values.floats", "converters.cells.connect_values"):
    module = importlib.import_module(f"tailrace.{name}")
    for thing in vars(module).values():
        if isinstance(thing, Dispatcher) and thing.nopython_signatures:
            found[thing.py_func.__qualname__] = sum(thing.stats.cache_misses.values())
print(len(found), sum(found.values()))
"""


@pytest.mark.slow
def test_a_second_process_compiles_nothing() -> None:
    subprocess.run([sys.executable, "-c", COUNT], check=True, capture_output=True, timeout=120)
    second = subprocess.run(
        [sys.executable, "-c", COUNT], check=True, capture_output=True, text=True, timeout=120
    )
    kernels, compiled = map(int, second.stdout.split())
    assert kernels > 20
    assert compiled == 0
