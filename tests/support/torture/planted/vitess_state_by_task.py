"""Planted bug: shards' positions are kept by task. A task that did not read a shard before begins at its
newest position, as a connector does that keeps offsets by task when it is restarted with another number of
tasks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tailrace.config.source.vitess import VitessSource
from tailrace.sources.vitess.resharding.events import OpenStream
from tailrace.sources.vitess.resharding.gtid_sets import TO_COPY
from tailrace.sources.vitess.streaming import keyspace_stream
from tailrace.sources.vitess.streaming.stream_requests import stream_request

if __name__ == "__main__":
    from tailrace.cli.main import app

    def _request(source: VitessSource, opened: OpenStream) -> Any:
        is_copied = bool(opened.keys) or opened.positions[opened.shard] == TO_COPY
        if opened.task > 0 and opened.attempt == 1 and not is_copied:
            opened = dataclasses.replace(opened, positions={opened.shard: "current"})
        return stream_request(source, opened)

    keyspace_stream.stream_request = _request  # type: ignore[attr-defined]
    app()
