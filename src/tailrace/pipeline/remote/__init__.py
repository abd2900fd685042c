"""Capture in a Spark task on an executor, which writes the log; the driver reads it (`tasks_on: spark`)."""

from tailrace.pipeline.remote.capture import RemoteCapture

__all__ = ["RemoteCapture"]
