"""The engine that `tailrace run` runs: capture, log, Spark and sinks.

Start with `run.Run`.
"""
