"""What `tailrace run` runs: capture, log, Spark and sinks as one engine.

Start with `run.Run`.
"""
