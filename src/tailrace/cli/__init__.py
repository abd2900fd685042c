"""The command line. Start with `main`: each command is a few lines over `tailrace.pipeline`.

Large modules are imported only when a command needs them, so that `tailrace --help` is fast.
"""
