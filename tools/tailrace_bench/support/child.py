"""Runs a module of the benchmarks as a program, after loading the kernels, which is not measured."""

from __future__ import annotations

import runpy
import sys

from tailrace.warm import load_kernels

if __name__ == "__main__":
    load_kernels()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
