"""Vitess: many shards of MySQL behind vtgate, captured through VStream."""

import os

# A process that starts Java forks. gRPC reads this variable when it is imported: without it, gRPC's threads
# would be restarted in the child process, and end it before it executes Java.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
