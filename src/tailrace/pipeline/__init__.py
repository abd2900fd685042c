"""What `tailrace run` runs: capture, log, Spark and sinks as one engine.

Start with `engine.Engine.run`.
"""
