"""All that commands, captures and sinks import: once, in the process that others are forked from."""

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
# It stays: a collection in a forked process need not look at it, and copy its pages for that.
gc.collect()
gc.freeze()
