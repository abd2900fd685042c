"""What a Kafka sink closes when it is closed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tailrace.records.group import Group
from tailrace.transforms import factory
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.kafka.shares_rig import fill, opened, sink_of, write
from tests.support.spark.wire import HandmadeLog


class Noted:
    """Passes all records on, and counts how often it was closed."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.closed = 0

    def apply(self, group: Group) -> Iterable[Group]:
        assert not self.closed
        return [group]

    def close(self) -> None:
        self.closed += 1
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("error", [None, ValueError("a canary")])
def test_transformations_are_closed_once_after_the_last_change(
    kafka: EmbeddedKafka, topic_name: str, tmp_path: Path, error: Exception | None
) -> None:
    noted = [Noted(error), Noted(None)]
    with HandmadeLog(tmp_path / "log") as log, capture_logs() as logs:
        ends = fill(log, 2)
        sink = opened(sink_of(kafka, topic_name, 0, chain=factory.build(noted)), log)
        for end in ends:
            write(sink, log, end)
        sink.close()
    assert [each.closed for each in noted] == [1, 1]
    told = [line for line in logs if line["event"] == "closing a step of a sink failed"]
    assert [line["error"] for line in told] == ([] if error is None else ["ValueError"])
    assert "canary" not in str(logs)
