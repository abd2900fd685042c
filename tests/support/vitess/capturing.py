"""A capture of Vitess in this process, and its log."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tailrace.changelog.reader import LogReader
from tailrace.config.sections import LogConfig
from tailrace.config.source.vitess import VitessSource
from tailrace.protocol import metadata_frames
from tailrace.protocol.frames import (
    CONTROL,
    HAS_SHARD,
    KIND_AT,
    SUBTYPE_AT,
    Bytes,
    control_json,
    each_frame,
)
from tailrace.sources.vitess.resharding.shard_state import Begun, ShardState
from tailrace.sources.vitess.streaming.capture_task import VitessCapture
from tests.support.vitess.fake_vtgate import KEYSPACE
from tests.support.vitess.reading import ChangeRead, read
from tests.support.wait import wait_until


class Capturing:
    """A running capture and its log; `failure` is the error that ended it."""

    def __init__(self, log: Path, section: VitessSource) -> None:
        self._log = log
        self.section = section
        self.capture = VitessCapture(section, log, LogConfig(path=log), name="shop")
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.capture.run()
        except BaseException as error:  # noqa: BLE001 - the test asks for it
            self.failure = error

    def counters(self) -> dict[int, list[int]]:
        """Return the counters of each key in log order."""
        found: dict[int, list[int]] = defaultdict(list)
        for change in self.changes():
            found[int(change.row["id"] or 0)].append(int(change.row["counter"] or 0))
        return dict(found)

    def changes(self) -> list[ChangeRead]:
        """Return the changes in the log, in order."""
        return read(self.frames())

    def states(self) -> dict[str, ShardState]:
        """Return the states of the shards in the log."""
        return shard_states_of(self._log)

    def frames(self) -> Bytes:
        """Return all frames in the log."""
        return frames_of(self._log)

    def shards(self) -> dict[str, str]:
        """Return the mode that `status` shows of each shard with a known position."""
        health = self.capture.progress().health
        shards = {} if health is None else health.details["shards"]
        return {name: each["state"] for name, each in shards.items() if ":" in each["gtid"]}

    def wait_for_shards(self, *streaming: str, timeout_s: float = 30.0) -> None:
        """Wait until exactly these shards are streamed."""
        wait_until(
            lambda: (
                self.failure is not None
                or {name for name, mode in self.shards().items() if mode == "streaming"} == set(streaming)
            ),
            timeout_s,
            f"{', '.join(streaming)} streamed",
        )
        if self.failure is not None:
            raise self.failure

    def wait_for_mode(self, mode: str, *shards: str, timeout_s: float = 90.0) -> None:
        """Wait until `status` shows this mode for these shards."""

        def is_there() -> bool:
            modes = self.shards()
            return self.failure is not None or all(modes.get(shard) == mode for shard in shards)

        wait_until(is_there, timeout_s, f"{', '.join(shards)} {mode}")
        if self.failure is not None:
            raise self.failure

    def wait_for_rows(self, rows: int, timeout_s: float = 30.0) -> None:
        """Wait until so many rows came since the start, and are durable."""

        def are_there() -> bool:
            progress = self.capture.progress()
            is_durable = progress.durable.offset >= progress.appended.offset
            return self.failure is not None or (progress.rows >= rows and is_durable)

        wait_until(are_there, timeout_s, f"{rows} rows")
        if self.failure is not None:
            raise self.failure

    @property
    def rows(self) -> int:
        """The number of rows since the start."""
        return self.capture.progress().rows


def shard_states_of(log: Path) -> dict[str, ShardState]:
    """Return the states of the shards in a log, which another process may write."""
    states = metadata_frames.shard_states(dict(metadata_frames.kept_frames(frames_of(log))))
    return {name.partition("/")[2]: ShardState.from_json(state) for name, state in states.items()}


@dataclass(frozen=True)
class Copies:
    """Up to which offset a log has rows of copies, as docs/resharding.md describes it.

    :param rows_until: of the last state of a shard that is copied: a row may be read again, as it is then.
    :param all_until: of the last state of one that is copied again, by several streams, or does not serve as
        far as known: after a reshard that copies rows again, changes may be repeated.
    """

    rows_until: int
    all_until: int


def copies_in(log: Path) -> Copies:
    """Return up to where copies brought rows to a log, which another process may write."""
    found = Copies(0, 0)
    with LogReader.open(log, "0") as reader:
        for ref in reader.blocks(reader.start, reader.end().offset):
            for place, frame in each_frame(reader.read(ref)):
                if frame[KIND_AT] == CONTROL and frame[SUBTYPE_AT] == HAS_SHARD:
                    state = ShardState.from_json(control_json(frame)["state"])
                    copy, at = state.copy, ref.header.log_offset + place
                    if copy is not None:
                        is_all = copy.is_again or copy.chunks or state.begun is Begun.COPY
                        found = Copies(at, at if is_all else found.all_until)
    return found


def frames_of(log: Path) -> Bytes:
    """Return all frames of a log, which another process may write."""
    with LogReader.open(log, "0") as reader:
        blocks = [reader.read(ref) for ref in reader.blocks(reader.start, reader.end().offset)]
    return np.concatenate(blocks) if blocks else np.zeros(0, np.uint8)


@contextlib.contextmanager
def capturing(at: Path, address: str, **settings: object) -> Iterator[Capturing]:
    """Run a capture until the block ends."""
    given = {"snapshot": "never", "heartbeat_interval_s": 1, "reconnect_delay_s": 0.1, **settings}
    section = VitessSource.model_validate({"hosts": [address], "keyspace": KEYSPACE, **given})
    found = Capturing(at / "log", section)
    found.thread.start()
    try:
        yield found
    finally:
        found.capture.stop()
        found.thread.join(30)
