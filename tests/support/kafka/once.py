"""A process that writes the numbers after its last offset, batch by batch, to be killed.

python -m tests.support.kafka.once BOOTSTRAP TOPIC ATOMIC BATCHES BATCH
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from tailrace.kafka.client import settings as client
from tailrace.kafka.offsets.topic import OffsetsTopic, source_key
from tailrace.kafka.producer.writer import AtomicWriter, PlainWriter, Task, Writer
from tailrace.records.events import Converted

KEYS = 7


def writer(
    bootstrap: str,
    name: str,
    *,
    atomic: bool = True,
    timeout_s: float = 60.0,
    offsets_topic: str | None = None,
    options: Mapping[str, str] | None = None,
) -> Writer:
    """Return a writer of the pipeline `name`, not yet opened; its offsets are in `<name>-offsets`, or in a
    topic that pipelines share.
    """
    common = client.client(bootstrap, options or {}, int(timeout_s * 1000))
    offsets = OffsetsTopic(
        offsets_topic or f"{name}-offsets",
        f"test-{name}",
        client.admin(common),
        client.consumer(common, "read_committed"),
        timeout_s,
    )
    offsets.require(create=True)
    settings = client.producer(common, int(timeout_s * 1000), f"test-{name}-0" if atomic else None)
    task = Task(settings, offsets, source_key(f"test-{name}", {"task": "0"}), "read_committed", timeout_s)
    return AtomicWriter(task) if atomic else PlainWriter(task)


def numbers(first: int, count: int) -> Converted:
    """Return records whose values count from `first`; the key is the remainder by `KEYS`."""
    values = range(first, first + count)
    return Converted(
        pa.array([str(value % KEYS) for value in values]), pa.array([str(value) for value in values])
    )


def reached(offset: Any) -> int:
    """Return the last number that is written according to the offset."""
    return 0 if offset is None else int(offset["number"])


def main() -> None:
    """Write until all batches are written, or until killed."""
    bootstrap, topic, atomic, batches, size = sys.argv[1:]
    out = writer(bootstrap, topic, atomic=atomic == "atomic")
    last = reached(out.open())
    for _ in range(int(batches)):
        out.send(topic, numbers(last + 1, int(size)))
        last += int(size)
        out.commit({"number": last})
    out.close()


if __name__ == "__main__":
    main()
