"""Planted bug: a separate producer writes the offset, outside of the records' transaction."""

from __future__ import annotations

import json
from typing import Any

if __name__ == "__main__":
    from confluent_kafka import Producer

    from tailrace.cli.main import app
    from tailrace.kafka.producer.writer import AtomicWriter

    def outside(self: AtomicWriter, offsets: Any) -> None:
        task = self._task
        settings = {name: value for name, value in task.settings.items() if "transaction" not in name}
        producer = Producer(settings)
        for key, offset in offsets.items():
            producer.produce(task.offsets.name, json.dumps(dict(offset)), key, task.offsets.partition(key))
        producer.flush(30)
        # So that there is a transaction to end at all.
        self._producer.flush(30)

    AtomicWriter._send_offsets = outside  # type: ignore[method-assign]
    app()
