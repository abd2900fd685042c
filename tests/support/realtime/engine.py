"""An engine over shards of text whose handler can be held up, to make its buffer overflow."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tailrace import Engine
from tailrace.pipeline.connector import PipelineConnector
from tailrace.pipeline.log.consumer import reader_name
from tests.support.wait import wait_until

CONSUMER = reader_name("shop")
TIMEOUT_S = 60.0
#: Some of these fill a buffer of `BUFFER_BYTES`.
WIDE = "x" * 20_000
BUFFER_BYTES = 64 * 1024


def announced(at: Path) -> Path:
    """Create a package that registers the type of source of these shards; return its path."""
    info = at / "package" / "text_shards-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: text-shards\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[tailrace.sources]\ntext_shards = tests.support.sources.text_shards:TextShards\n"
    )
    return info.parent


class Shard:
    """A source for tests: one shard of one table."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        folder.mkdir()
        columns = [["id", "int8"], ["what", "text"]]
        table = {"relation": 7, "name": "orders", "columns": columns, "key": ["id"], "rows": []}
        (folder / "tables.json").write_text(json.dumps({"orders": table}))
        (folder / "a.jsonl").touch()

    def commit(self, rows: int = 1, what: str = "small") -> None:
        """Commit one transaction."""
        changes = [["insert", "orders", [str(self.count + n + 1), what]] for n in range(rows)]
        self.count += rows
        with (self.folder / "a.jsonl").open("a") as file:
            file.write(json.dumps({"time_us": 1_700_000_000_000_000, "changes": changes}) + "\n")


class Running:
    """An engine of a shard, in this process.

    :param realtime: the section of its file.
    :param awaited: its handler is an `async` function.
    """

    def __init__(
        self,
        shard: Shard,
        log: Path,
        realtime: Any,
        *,
        sinks: Sequence[Any] = (),
        awaited: bool = False,
        **options: Any,
    ) -> None:
        self.shard, self.log = shard, log
        self.seen: list[int] = []
        #: The consumer that `view` describes.
        self.watched = CONSUMER
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        source = {"type": "text_shards", "folder": str(shard.folder), "shards": ["a"]}
        self.engine = Engine(
            name="shop",
            connector=PipelineConnector(),
            settings={
                "source": source,
                "log": {"path": str(log)},
                "realtime": realtime,
                "sinks": sinks,
                "spark": {"start": "when_needed"},
            },
            on_batch=self._await_and_take if awaited else self._take,
            options=options or None,
        )

    def __enter__(self) -> Self:
        self.engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.may_go_on.set()
        self.engine.close()

    def _take(self, batch: Any) -> None:
        self.may_go_on.wait(TIMEOUT_S)
        self.seen += [record.after["id"] for record in batch]

    async def _await_and_take(self, batch: Any) -> None:
        await asyncio.to_thread(self.may_go_on.wait, TIMEOUT_S)
        self._take(batch)

    def command(self, *, on: bool) -> None:
        self.engine.switch_realtime(on=on)

    @property
    def view(self) -> Any:
        """The consumer's real-time path as the status shows it."""
        try:
            status = json.loads((self.log / "status.json").read_text())
        except OSError:
            return {}
        return self.views(status).get(self.watched, {})

    @staticmethod
    def views(status: Any) -> dict[str, Any]:
        """Return what the status shows of each consumer."""
        return {sink["name"]: sink["realtime"] for sink in status["sinks"] if "realtime" in sink}

    def wait_for(self, **wanted: Any) -> None:
        """Wait until the path shows these values."""
        wait_until(lambda: wanted.items() <= self.view.items(), TIMEOUT_S, f"{wanted}")

    def wait_for_rows(self) -> None:
        """Wait until the handler got every row, and check that each came once, in order."""
        wait_until(lambda: len(self.seen) >= self.shard.count, TIMEOUT_S, "every row")
        assert self.seen == list(range(1, self.shard.count + 1))
