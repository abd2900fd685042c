"""The Spark source applies its pipeline's masks and excluded columns to a log."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from tailrace.changelog.disclosure import keep_disclosure, kept_disclosure
from tailrace.config import ColumnPolicy
from tailrace.errors import Kind, TailraceError
from tailrace.spark.datasource import TailraceDataSource
from tests.support.orders_log import LogOfOrders

SALT = "a salt that is long enough"


def test_readers_of_a_log_get_what_sinks_get(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogOfOrders(tmp_path / "log")
    assert kept_disclosure(log.directory, "0") == ColumnPolicy()
    log.insert(1, 2)
    log.close()
    (tmp_path / "salt").write_text(SALT)
    mask = {"columns": ["public.orders.id"], "method": "hash", "salt": f"${{file:{tmp_path / 'salt'}}}"}
    rules = ColumnPolicy.model_validate({"masks": [mask], "columns_exclude": ["*.*.what"]})
    keep_disclosure(log.directory, "0", rules)
    assert kept_disclosure(log.directory, "0") == rules

    def rows(**options: str) -> list[dict[str, Any]]:
        read = spark.read.format("tailrace").options(path=str(tmp_path / "log"), **options)
        return [row.asDict() for row in read.load().collect()]

    hashes = {hmac.digest(SALT.encode(), text, hashlib.sha256).hex() for text in (b"1", b"2")}
    typed = rows(table="public.orders")
    assert {row["id"] for row in typed} == hashes
    assert "what" not in typed[0]
    assert {row["after"]["id"] for row in rows()} == hashes
    assert {(row["id"], row["what"]) for row in rows(table="public.orders", raw="true")} == {
        (1, "thing"),
        (2, "thing"),
    }
    (tmp_path / "salt").unlink()
    with pytest.raises(Exception, match="secret_missing"):
        rows()
    assert len(rows(raw="true")) == 2


def test_rules_of_a_later_version_are_refused(tmp_path: Path) -> None:
    log = LogOfOrders(tmp_path / "log")
    log.close()
    log.directory.state_write("tasks/0/disclosure.state", {"masks": [], "shuffled": True})
    with pytest.raises(TailraceError) as caught:
        kept_disclosure(log.directory, "0")
    assert caught.value.kind is Kind.LOG_FORMAT_UNKNOWN


def test_rules_whose_file_is_damaged_are_not_replaced_by_the_ones_before_them(tmp_path: Path) -> None:
    log = LogOfOrders(tmp_path / "log")
    log.close()
    keep_disclosure(log.directory, "0", ColumnPolicy())
    rules = ColumnPolicy.model_validate({"columns_exclude": ["public.orders.what"]})
    keep_disclosure(log.directory, "0", rules)
    (tmp_path / "log" / "tasks" / "0" / "disclosure.state").write_bytes(b"damaged")
    assert kept_disclosure(log.directory, "0") == rules


def test_a_running_stream_follows_what_capture_records(tmp_path: Path) -> None:
    """The rules of a micro-batch are those when it is planned."""
    log = LogOfOrders(tmp_path / "log")
    log.insert(1)
    source = TailraceDataSource({"path": str(tmp_path / "log")})
    stream = source.streamReader(source.schema())
    place = stream.initialOffset()

    def next_batch() -> list[Any]:
        nonlocal place
        before, place = place, stream.latestOffset(place, ReadAllAvailable())
        (partition,) = stream.partitions(before, place)
        return [dict(row) for batch in stream.read(partition) for row in batch["after"].to_pylist()]

    assert next_batch() == [{"id": "1", "what": "thing"}]
    mask = {"columns": ["*.*.what"], "method": "fixed", "value": "hidden"}
    keep_disclosure(log.directory, "0", ColumnPolicy.model_validate({"masks": [mask]}))
    log.insert(2)
    assert next_batch() == [{"id": "2", "what": "hidden"}]
    log.close()
