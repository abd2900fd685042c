"""Vitess: many shards of MySQL behind vtgate, captured through VStream."""

import os

# A process that starts Java forks. gRPC reads this when it is imported: it is not to follow into the child,
# where its threads would come to life and end it before it is Java.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
