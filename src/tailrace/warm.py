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
    "tailrace.sources.postgres.streaming.message_filter",
    "tailrace.sources.postgres.streaming.frame_filter",
    "tailrace.sources.postgres.streaming.duplicate_filter",
    "tailrace.sources.postgres.streaming.unchanged_updates",
    "tailrace.sources.postgres.connection.backend_messages",
    "tailrace.sources.postgres.decode.values.times",
    "tailrace.sources.postgres.decode.values.decimals",
    "tailrace.sources.postgres.decode.values.digits",
    "tailrace.sources.postgres.decode.envelope",
    "tailrace.sources.postgres.decode.values.floats",
    "tailrace.sources.postgres.decode.values.foreign_texts",
    "tailrace.sources.postgres.decode.values.forms",
    "tailrace.sources.postgres.decode.gather",
    "tailrace.sources.postgres.decode.values.hstore",
    "tailrace.sources.postgres.decode.values.json_texts",
    "tailrace.sources.postgres.decode.json.json_kernel",
    "tailrace.sources.postgres.decode.kernel",
    "tailrace.sources.postgres.decode.values.text_writers",
    "tailrace.sources.postgres.decode.values.literals",
    "tailrace.sources.postgres.decode.values.masks",
    "tailrace.sources.postgres.decode.values.stamps",
    "tailrace.converters.avro.binary",
    "tailrace.converters.avro.kernels",
    "tailrace.converters.cells.texts",
    "tailrace.kafka.producer.partitioner",
    "tailrace.records.fingerprints",
)


def load_kernels() -> float:
    """Import every module that has kernels; return how many seconds that took."""
    began = time.monotonic()
    for name in KERNEL_MODULES:
        importlib.import_module(name)
    return time.monotonic() - began


if __name__ == "__main__":
    print(f"kernels ready in {load_kernels():.1f} s")
