"""Sends standby status updates to the server, on a separate thread.

The three positions of the message are all the log's durable position. What was only received, and
the WAL end of a keepalive, is never acknowledged. The thread uses neither the receiver's buffer
nor the disk, so a slow disk delays no message.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable

from tailrace import failpoints
from tailrace.model import POSTGRES_EPOCH_US
from tailrace.sources.postgres.connection.transport import Transport

#: Delay of a message about progress that the server did not request, and shortest time between two
#: replies, however fast the server repeats its requests; in seconds.
PROGRESS_DELAY_S = 0.2
REPLY_INTERVAL_S = 0.01

CLOSE_DEADLINE_S = 15.0


def status_message(position: int, clock_us: int, *, reply_wanted: bool = False) -> bytes:
    """Return a standby status update: written, flushed and applied up to `position`.

    :param clock_us: microseconds since 1970.
    """
    return struct.pack(
        "!cQQQqb", b"r", position, position, position, clock_us - POSTGRES_EPOCH_US, reply_wanted
    )


class StatusTimer:
    """Sends the durable position: every `interval_s`, at once on request, and soon after progress.

    :param durable: returns the log's durable position; called right before each message.
    :param may_acknowledge: raises an error if the log has another writer now.
    """

    def __init__(
        self,
        transport: Transport,
        durable: Callable[[], int],
        may_acknowledge: Callable[[], None],
        interval_s: float,
    ) -> None:
        self._transport = transport
        self._durable = durable
        self._may_acknowledge = may_acknowledge
        self._interval_s = interval_s
        self._changed = threading.Condition()
        self._asked = False  # by the server
        self._asking = False  # we want a reply
        self._stopped = False
        self._sent_at = float("-inf")
        self.acknowledged = 0  # the last position that was sent
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="tailrace-status", daemon=True)

    def start(self) -> None:
        """Start the thread, which sends the first message at once."""
        self._asked = True
        self._thread.start()

    def reply(self) -> None:
        """Send a message at once, as the server requested."""
        with self._changed:
            self._asked = True
            self._changed.notify()

    def ask(self) -> None:
        """Ask the server for a keepalive."""
        with self._changed:
            self._asked = self._asking = True
            self._changed.notify()

    def progressed(self) -> None:
        """Note that the durable position has increased."""
        with self._changed:
            self._changed.notify()

    def close(self) -> None:
        """Send a last message and end the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_DEADLINE_S)

    def _run(self) -> None:
        try:
            stopped = False
            while not stopped:
                with self._changed:
                    while (wait_s := self._wait_s()) > 0:
                        self._changed.wait(wait_s)
                    stopped, asking = self._stopped, self._asking
                    self._asked = self._asking = False
                self._send(asking)
                self._sent_at = time.monotonic()
        except Exception as error:  # noqa: BLE001 - the receiver raises it on its own thread
            self.error = error

    def _wait_s(self) -> float:
        """Return the seconds until the next message is due."""
        interval_s = self._interval_s
        if self._stopped:
            interval_s = 0.0
        elif self._asked:
            interval_s = REPLY_INTERVAL_S
        elif self._durable() > self.acknowledged:
            interval_s = min(PROGRESS_DELAY_S, interval_s)
        return self._sent_at + interval_s - time.monotonic()

    def _send(self, asking: bool) -> None:
        position = self._durable()
        advances = position > self.acknowledged
        self._may_acknowledge()
        if advances:
            failpoints.hit("capture.before_acknowledge")
        self._transport.send(status_message(position, time.time_ns() // 1000, reply_wanted=asking))
        self.acknowledged = position
        if advances:
            failpoints.hit("capture.after_acknowledge")
