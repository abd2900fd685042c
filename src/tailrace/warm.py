"""Have every compiled kernel ready before the first change comes.

Kernels are compiled when they are first needed, which takes seconds each, and loaded from numba's
cache from then on. `make setup` runs this module once; a Spark worker calls `load_kernels`, so that
it neither compiles nor loads while changes wait.
"""

from __future__ import annotations

import importlib
import time

from tailrace.compiled import load_all

#: Every module with a kernel; tests/test_tidy.py holds this against the sources.
KERNEL_MODULES = (
    "tailrace.protocol.frames",
    "tailrace.protocol.metadata_frames",
    "tailrace.sources.postgres.streaming.frame_filters",
    "tailrace.sources.postgres.streaming.unchanged_updates",
    "tailrace.sources.postgres.connection.backend_messages",
    "tailrace.decode.values.times",
    "tailrace.decode.values.decimals",
    "tailrace.decode.values.digits",
    "tailrace.decode.envelope",
    "tailrace.decode.values.floats",
    "tailrace.decode.tuples",
    "tailrace.decode.values.forms",
    "tailrace.decode.gather",
    "tailrace.decode.values.hstore",
    "tailrace.decode.values.json_texts",
    "tailrace.decode.json.json_kernel",
    "tailrace.decode.json.members",
    "tailrace.decode.kernel",
    "tailrace.decode.shards",
    "tailrace.decode.values.text_writers",
    "tailrace.decode.values.literals",
    "tailrace.decode.values.masks",
    "tailrace.decode.values.stamps",
    "tailrace.sources.vitess.rows.events",
    "tailrace.sources.vitess.rows.values",
    "tailrace.sources.vitess.rows.transactions",
    "tailrace.sources.vitess.rows.images",
    "tailrace.sources.vitess.rows.kernel",
    "tailrace.converters.avro.encoder",
    "tailrace.converters.cells.connect_values",
    "tailrace.kafka.producer.partitioner",
    "tailrace.records.fingerprints",
    "tailrace.join.postgres_ids",
)


def load_kernels() -> float:
    """Load every kernel, compiled first if no cache has it; return how many seconds that took."""
    began = time.monotonic()
    for name in KERNEL_MODULES:
        importlib.import_module(name)
    load_all()
    return time.monotonic() - began


if __name__ == "__main__":
    print(f"kernels ready in {load_kernels():.1f} s")
