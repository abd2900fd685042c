"""Planted bug: a failed commit is ignored, and the next batch is written by a new producer."""

from __future__ import annotations

if __name__ == "__main__":
    from confluent_kafka import KafkaException, Producer

    from tailrace.cli.main import app
    from tailrace.kafka.producer.sender import Sender
    from tailrace.kafka.producer.writer import AtomicWriter

    as_built = AtomicWriter._commit

    def forgiving(self: AtomicWriter, timeout_s: float | None) -> None:
        try:
            as_built(self, timeout_s)
        except KafkaException:
            self._producer = Producer(dict(self._task.settings))
            self._producer.init_transactions(60)
            self._sender = Sender(self._producer, self._task.settings, self._task.timeout_s)

    AtomicWriter._commit = forgiving  # type: ignore[method-assign]
    app()
