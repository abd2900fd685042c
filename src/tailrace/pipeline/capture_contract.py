"""What a lane needs of a capture, wherever it runs."""

from __future__ import annotations

from typing import Protocol

from tailrace.sources.postgres.streaming.progress import CaptureProgress


class CaptureContract(Protocol):
    """Brings one database into one log: `CaptureTask` here, `RemoteCapture` on an executor.

    `run` once; the rest from any thread.
    """

    def run(self) -> None:
        """Capture until `stop`, or until there is nothing more to do.

        :raises TailraceError: what a person must deal with.
        """
        ...

    def stop(self) -> None:
        """Ask `run` to return, with everything that was received durable and acknowledged."""
        ...

    def caught_up(self, lsn: int) -> bool:
        """Return whether everything that was committed before `lsn` is durable in the log."""
        ...

    def progress(self) -> CaptureProgress:
        """Return how far it is."""
        ...
