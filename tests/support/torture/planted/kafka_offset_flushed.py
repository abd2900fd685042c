"""No bug in itself: an offset has come to the broker before its transaction's commit is asked for.

Who reads offsets that are not committed takes it for one that is.
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
