"""Record processing on Spark: the runner that `record_processing.runs_on: spark` asks for."""

from tailrace.spark.processing.runner import SparkRunner

__all__ = ["SparkRunner"]
