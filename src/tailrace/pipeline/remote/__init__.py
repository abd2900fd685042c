"""Capture in a Spark task on an executor, which writes the log; the driver reads it (`tasks_on: spark`)."""
