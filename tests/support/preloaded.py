"""Everything that commands, captures and sinks import, for the process that others are forked from."""

from __future__ import annotations

import gc
import importlib

from tailrace import warm

for _name in (
    "tailrace.cli.main",
    "tailrace.cli.run",
    "tailrace.pipeline.run",
    "tailrace.sinks.kafka.sink",
    "tailrace.sources.postgres.source",
    "tailrace.sources.postgres.streaming.capture_task",
    "tailrace.spark.session",
    "prometheus_client",
    "pyspark.sql",
    "pyspark.worker",
):
    importlib.import_module(_name)
warm.load_kernels()
# Exempt from garbage collection: a collection in a forked process would copy the pages.
gc.collect()
gc.freeze()
