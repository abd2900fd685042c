"""The command line. Start with `main`: each command is a few lines over `tailrace.pipeline`.

Nothing heavy is imported before a command needs it, so that `tailrace --help` is quick.
"""
