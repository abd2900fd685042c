"""Record processing on Spark: the runner for `record_processing.runs_on: spark`."""

from tailrace.spark.processing.runner import SparkRunner

__all__ = ["SparkRunner"]
