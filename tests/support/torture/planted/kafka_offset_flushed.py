"""No bug in itself: the offset reaches the broker before the commit of its transaction is requested.

A reader of uncommitted offsets takes it for a committed one.
"""

from __future__ import annotations

from typing import Any

if __name__ == "__main__":
    from tailrace.cli.main import app
    from tailrace.kafka.producer.writer import AtomicWriter

    as_built = AtomicWriter._send_offsets

    def flushed(self: AtomicWriter, offsets: Any) -> None:
        as_built(self, offsets)
        self._producer.flush(30)

    AtomicWriter._send_offsets = flushed  # type: ignore[method-assign]
    app()
