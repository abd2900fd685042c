"""Have every compiled kernel ready before the first change comes.

Kernels are compiled when their module is first imported, which takes seconds each, and loaded
from numba's cache from then on. `make setup` runs this module once; a Spark worker calls
`load_kernels`, so that it never compiles while changes wait.
"""

from __future__ import annotations

import importlib
import time

#: Every module with a kernel; tests/test_tidy.py holds this against the sources.
KERNEL_MODULES = (
    "tailrace.protocol.frames",
    "tailrace.capture.passing",
    "tailrace.capture.resumption",
    "tailrace.capture.wire",
    "tailrace.decode.clock",
    "tailrace.decode.decimals",
    "tailrace.decode.digits",
    "tailrace.decode.envelope",
    "tailrace.decode.floats",
    "tailrace.decode.forms",
    "tailrace.decode.gather",
    "tailrace.decode.hashing",
    "tailrace.decode.hstore",
    "tailrace.decode.jsontext",
    "tailrace.decode.kernel",
    "tailrace.decode.lettering",
    "tailrace.decode.literals",
    "tailrace.decode.masks",
    "tailrace.converters.avro_binary",
    "tailrace.converters.avro_parts",
    "tailrace.converters.texts",
    "tailrace.kafka.partitioning",
    "tailrace.records.fingerprints",
    "tailrace.sql.json_members",
)


def load_kernels() -> float:
    """Import every module that has kernels; return how many seconds that took."""
    began = time.monotonic()
    for name in KERNEL_MODULES:
        importlib.import_module(name)
    return time.monotonic() - began


if __name__ == "__main__":
    print(f"kernels ready in {load_kernels():.1f} s")
