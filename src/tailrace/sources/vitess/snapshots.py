"""Requested snapshots of a keyspace: their records in the log's directory, and requests from any process."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tailrace.changelog.directory import TASK, LogDirectory
from tailrace.changelog.lock import is_written
from tailrace.errors import Kind, TailraceError
from tailrace.sources.progress import SourceWarning, TableProgress
from tailrace.sources.snapshot_requests import Request, ask, waiting

_NAME = f"tasks/{TASK}/keyspace-snapshots.state"

#: Number of snapshots of which records are kept.
_FINISHED_MAX = 50


class Outcome(enum.StrEnum):
    """The outcome of a snapshot."""

    OPEN = "open"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True)
class AskedSnapshot:
    """A requested snapshot.

    :param tables: as `keyspace.table`; empty: the keys of shards that need a snapshot.
    :param begun: it has started; its progress is in the states of the shards in the log.
    :param since: the log's end when it started.
    :param whole: all rows of the tables are read, in every shard.
    """

    id: str
    requested_us: int
    tables: tuple[str, ...] = ()
    state: Outcome = Outcome.OPEN
    begun: bool = False
    since: int = 0
    whole: bool = False
    finished_us: int | None = None
    error: dict[str, Any] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The tables without their keyspace."""
        return tuple(name.partition(".")[2] for name in self.tables)

    def shown(self) -> dict[str, Any]:
        """Return the object that `tailrace snapshot --list` prints."""
        rows = None if self.begun else 0
        return _shown(self.id, self.requested_us, self.tables, str(self.state), rows) | {
            "finished_us": self.finished_us,
            "error": self.error,
        }


@dataclass(slots=True)
class KeptSnapshots:
    """The records of snapshots in the log's directory: finished ones, and at most one open one, the last."""

    all: list[AskedSnapshot] = field(default_factory=list)

    @classmethod
    def read(cls, directory: LogDirectory) -> KeptSnapshots:
        content = directory.state_read(_NAME)
        if content is None:
            return cls()
        return cls(
            [
                AskedSnapshot(**{**each, "tables": tuple(each["tables"]), "state": Outcome(each["state"])})
                for each in content["snapshots"]
            ]
        )

    def write(self, directory: LogDirectory) -> None:
        """Write the records durably.

        :raises TailraceError: `LOG_FULL`, `LOG_WRITE_FAILED`.
        """
        self.all = self.all[-_FINISHED_MAX:]
        directory.state_write(_NAME, {"snapshots": [asdict(each) for each in self.all]})

    @property
    def warnings(self) -> list[SourceWarning]:
        """The warning about the last snapshot, if it failed."""
        last = self.all[-1] if self.all else None
        if last is None or last.state is not Outcome.FAILED or last.error is None:
            return []
        message = f"the snapshot {last.id} failed: {last.error['message']}"
        return [SourceWarning(f"snapshot_failed:{last.id}", message, str(last.error["hint"]))]

    @property
    def open(self) -> AskedSnapshot | None:
        """The snapshot in progress."""
        return self.all[-1] if self.all and self.all[-1].state is Outcome.OPEN else None

    def has(self, request: Request) -> bool:
        """Return whether a request was already taken."""
        return any(each.id == request.id for each in self.all)


class VitessSnapshots:
    """The snapshots of the log at a path; see `tailrace.sources.contract.Snapshots`."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def request(self, tables: Sequence[str], where: str) -> dict[str, Any]:
        if where:
            raise _impossible("--where")
        asked = ask(LogDirectory.open(self._log), tables=tables)
        return {"id": asked.id, "engine_runs": is_written(self._log, TASK)}

    def cancel(self, tables: Sequence[str]) -> dict[str, Any]:
        raise _impossible("--cancel")

    def pause(self, *, pauses: bool) -> dict[str, Any]:
        raise _impossible("--pause" if pauses else "--resume")

    def known(self) -> list[dict[str, Any]]:
        directory = LogDirectory.open(self._log)
        kept = KeptSnapshots.read(directory)
        return [
            *(each.shown() for each in kept.all),
            *(
                _shown(each.id, each.requested_us, each.tables, "waiting", 0)
                for each in waiting(directory)
                if not kept.has(each)
            ),
        ]

    @property
    def is_request_open(self) -> bool:
        return any(each["state"] in ("waiting", str(Outcome.OPEN)) for each in self.known())

    @property
    def needed_from(self) -> int | None:
        return None  # the states of the shards are repeated in each segment

    @property
    def warnings(self) -> list[SourceWarning]:
        try:
            return KeptSnapshots.read(LogDirectory.open(self._log)).warnings
        except TailraceError:
            return []  # the next start reports the error

    @property
    def unfinished(self) -> Mapping[str, TableProgress]:
        return {}  # the states of the shards have it


def _impossible(option: str) -> TailraceError:
    return TailraceError(
        Kind.CONFIG_INVALID,
        f"ask for a snapshot of Vitess: {option} is for PostgreSQL only",
        "tailrace snapshot FILE --table keyspace.table, --lost or --list",
    )


def _shown(
    number: str, requested_us: int, tables: Sequence[str], state: str, rows: int | None
) -> dict[str, Any]:
    # Rows are not counted: None once there may be some.
    return {
        "id": number, "origin": "requested" if tables else "requested for lost shards", "state": state,
        "where": "", "requested_us": requested_us, "finished_us": None, "error": None,
        "tables": [{"name": name, "rows": rows, "chunks": 0, "chunks_done": 0} for name in tables],
    }  # fmt: skip
