"""The status timer: when it sends, and that it never acknowledges more than what is durable."""

from __future__ import annotations

import struct
import threading
import time
from typing import Any

import pytest

from tailrace.errors import Kind, TailraceError
from tailrace.sources.postgres.connection.transport import Received
from tailrace.sources.postgres.streaming.standby_status import StatusTimer, status_message
from tests.support.wait import wait_until


class Recorder:
    """A transport that records what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[float, int, bool]] = []

    def start(self, command: bytes, deadline_s: float, waiting: Any = None) -> None: ...

    def receive(self, wait_s: float) -> Received:
        raise NotImplementedError

    def send(self, payload: bytes) -> None:
        kind, written, flushed, applied, _, reply = struct.unpack("!cQQQqb", payload)
        assert (kind, len(payload)) == (b"r", 34)
        assert written == flushed == applied
        self.sent.append((time.monotonic(), written, bool(reply)))

    def release(self) -> None: ...

    def close(self) -> None: ...


def test_the_message_has_34_bytes_and_postgresqls_clock() -> None:
    message = status_message(0x0102030405060708, 946_684_800_000_001)
    assert message.hex() == "72" + 3 * "0102030405060708" + "0000000000000001" + "00"


def test_updates_are_sent_at_intervals_at_once_on_request_and_soon_after_progress() -> None:
    recorder, durable = Recorder(), [100]
    timer = StatusTimer(recorder, lambda: durable[0], lambda: None, interval_s=30)
    timer.start()
    wait_until(lambda: len(recorder.sent) == 1, 60)
    timer.reply()
    wait_until(lambda: len(recorder.sent) == 2, 60)
    timer.ask()
    wait_until(lambda: recorder.sent[-1][2], 60)
    durable[0] = 200
    began = time.monotonic()
    timer.progressed()
    wait_until(lambda: recorder.sent[-1][1] == 200, 60)
    assert time.monotonic() - began < 1
    durable[0] = 300
    timer.close()
    assert recorder.sent[-1][1] == 300
    assert timer.acknowledged == 300


def test_updates_are_sent_without_a_request() -> None:
    recorder = Recorder()
    timer = StatusTimer(recorder, lambda: 1, lambda: None, interval_s=0.05)
    timer.start()
    wait_until(lambda: len(recorder.sent) >= 4, 60)
    timer.close()


def test_nothing_is_acknowledged_for_a_fenced_writer() -> None:
    def fenced() -> None:
        raise TailraceError(Kind.LOG_FENCED, "somebody else writes")

    recorder = Recorder()
    timer = StatusTimer(recorder, lambda: 1, fenced, interval_s=0.05)
    timer.start()
    wait_until(lambda: timer.error is not None, 60)
    timer.close()
    assert recorder.sent == []


@pytest.mark.parametrize("asks", [50])
def test_answers_to_a_server_that_keeps_requesting_are_limited(asks: int) -> None:
    recorder = Recorder()
    timer = StatusTimer(recorder, lambda: 1, lambda: None, interval_s=30)
    timer.start()
    over = threading.Event()
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        timer.reply()
        over.wait(0.0005)
    timer.close()
    assert len(recorder.sent) < asks
