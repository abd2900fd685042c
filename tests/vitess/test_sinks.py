"""A resharded keyspace through `tailrace run` into every kind of sink: order by key, and the rows' shards."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable

from tailrace_servers.kafka import EmbeddedKafka
from tests.support.kafka.reading import Message, read_topic
from tests.support.vitess.end_to_end import lines_of, pipeline_file, tailrace
from tests.support.vitess.fake_vtgate import FakeVtgate

pytestmark = pytest.mark.timeout(600)

KEYS = range(6)
TABLE = "shop.counters"
STEP = """
    transformations:
      - {type: add_fields, metadata: {_shard: shard, _gtid: gtid}}
"""


def _pipeline(at: Path, vtgate: FakeVtgate, sinks: str) -> Path:
    file = at / "pipeline.yaml"
    section = {"type": "vitess", "hosts": [vtgate.address], "keyspace": "shop", "heartbeat_interval_s": 1}
    file.write_text(
        f"name: shop\nsource: {json.dumps({**section, 'snapshot': 'never'})}\nlog: {{path: ./log}}\n"
        f"sinks:\n{sinks}"
    )
    return file


class Keyspace:
    """Writes each key's counter, 0, 1, 2 …, to the shard that has the key."""

    def __init__(self, vtgate: FakeVtgate) -> None:
        self._vtgate = vtgate
        self.counters = dict.fromkeys(KEYS, -1)

    def write(self, *shards: str, times: int = 2) -> None:
        """Raise every counter; a key's shard is its number modulo the number of shards."""
        for _ in range(times):
            for key in KEYS:
                self.counters[key] += 1
                self._vtgate.write(shards[key % len(shards)], (key, self.counters[key]))


def _resharded(file: Path, vtgate: FakeVtgate) -> Keyspace:
    """Run a pipeline over a split and a merge; each process reads journals and changes after them."""
    keyspace = Keyspace(vtgate)
    tailrace("run", file, "--until-caught-up")  # from here on changes are captured
    keyspace.write("0")
    tailrace("run", file, "--until-caught-up")
    keyspace.write("0")
    vtgate.reshard(["0"], ["-80", "80-"])
    keyspace.write("-80", "80-")
    tailrace("run", file, "--until-caught-up")
    vtgate.reshard(["-80", "80-"], ["-40", "40-c0", "c0-"])
    keyspace.write("-40", "40-c0", "c0-")
    vtgate.reshard(["-40", "40-c0", "c0-"], ["0"])
    keyspace.write("0")
    tailrace("run", file, "--until-caught-up")
    return keyspace


def _assert_in_order(rows: Iterable[tuple[int, int]], keyspace: Keyspace) -> None:
    found: dict[int, list[int]] = defaultdict(list)
    for key, counter in rows:
        found[key].append(counter)
    assert found == {key: list(range(last + 1)) for key, last in keyspace.counters.items()}


def _assert_says_its_shard(rows: list[dict[str, Any]]) -> None:
    """Check that each row has its shard, whose positions only rise."""
    last: dict[str, int] = defaultdict(int)
    for row in rows:
        server, _, number = row["_gtid"].rpartition("-")
        assert int(number) > last[f"{row['_shard']} {server}"]
        last[f"{row['_shard']} {server}"] = int(number)
    assert {row["_shard"] for row in rows} == {"0", "-80", "80-", "-40", "40-c0", "c0-"}


@pytest.mark.slow
def test_masked_columns_are_masked_in_a_sink_and_for_readers_of_the_log(tmp_path: Path) -> None:
    masks = [{"columns": ["*.*.counter"], "method": "null"}]
    with FakeVtgate("0") as vtgate:
        file = pipeline_file(tmp_path, vtgate, "counters", sinks=["jsonl"], snapshot="never", masks=masks)
        tailrace("run", file, "--until-caught-up")
        vtgate.write("0", (1, 77_777))
        tailrace("run", file, "--until-caught-up")
    [line] = lines_of(tmp_path, "counters")
    assert line["after"] == {"id": 1, "counter": None}
    [change] = tailrace("log", "show", tmp_path / "log", "--json").splitlines()
    assert json.loads(change)["after"] == line["after"]


@pytest.mark.slow
def test_files_and_tables_have_each_key_in_order_with_its_shard(tmp_path: Path) -> None:
    sinks = "".join(
        f"  - type: {kind}\n    path: ./{path}{more}{STEP}"
        for kind, path, more in (
            ("jsonl", "lines", ""),
            ("parquet", "parquet", ""),
            ("delta", "history", ""),
            ("delta", "mirror", "\n    mode: mirror"),
        )
    )
    with FakeVtgate("0") as vtgate:
        keyspace = _resharded(_pipeline(tmp_path, vtgate, sinks), vtgate)
    lines = lines_of(tmp_path, "counters")
    lines.sort(key=lambda line: line["position"]["log_offset"])
    _assert_in_order(((line["after"]["id"], line["after"]["counter"]) for line in lines), keyspace)
    assert all(line["after"]["_shard"] == line["source"]["shard"] for line in lines)
    assert all(json.loads(line["source"]["vgtid"])[0]["gtid"] == line["after"]["_gtid"] for line in lines)
    parquet = ds.dataset(str(tmp_path / "parquet" / TABLE), format="parquet").to_table()
    history = DeltaTable(str(tmp_path / "history" / TABLE)).to_pyarrow_table()
    for table in (parquet, history):
        rows = table.sort_by("_log_offset").to_pylist()
        _assert_in_order(((row["id"], row["counter"]) for row in rows), keyspace)
        _assert_says_its_shard(rows)
    mirrored = DeltaTable(str(tmp_path / "mirror" / TABLE)).to_pyarrow_table().to_pylist()
    assert {row["id"]: row["counter"] for row in mirrored} == keyspace.counters
    assert {row["_shard"] for row in mirrored} == {"0"}


@pytest.mark.parametrize("is_atomic", [True, False])
def test_kafka_has_each_key_in_order_and_transactions_by_their_vgtid(
    tmp_path: Path, kafka: EmbeddedKafka, topic_name: str, *, is_atomic: bool
) -> None:
    sink = {
        "type": "kafka",
        "bootstrap_servers": kafka.bootstrap,
        "topic_prefix": topic_name,
        "group": topic_name,
        "offsets_topic": f"{topic_name}-offsets",
        "atomic_source_offset_commit": is_atomic,
        "provide_transaction_metadata": True,
        "converter": {"type": "json", "schemas_enable": False},
        "topics": [{"tables": [TABLE], "partitions": 3}],
    }
    with FakeVtgate("0") as vtgate:
        keyspace = _resharded(_pipeline(tmp_path, vtgate, f"  - {json.dumps(sink)}\n"), vtgate)
    found = read_topic(kafka.bootstrap, f"{topic_name}.{TABLE}")
    documents = [message.document for message in found]
    _assert_in_order(((each["after"]["id"], each["after"]["counter"]) for each in documents), keyspace)
    for each in documents:
        transaction = each["transaction"]
        assert transaction["id"] == each["source"]["vgtid"]
        assert (transaction["total_order"], transaction["data_collection_order"]) == (1, 1)
    epochs = {each["source"]["shard"]: set() for each in documents}
    for each in documents:
        epochs[each["source"]["shard"]].add(each["transaction"]["transaction_epoch"])
    assert epochs == {"0": {0, 3}, "-80": {1}, "80-": {1}, "-40": {2}, "40-c0": {2}, "c0-": {2}}
    _assert_boundaries(read_topic(kafka.bootstrap, f"{topic_name}.transaction"), documents)


def _assert_boundaries(messages: list[Message], documents: list[Any]) -> None:
    boundaries = [message.document for message in messages]
    assert [each["status"] for each in boundaries] == ["BEGIN", "END"] * len(documents)
    for begin, end in zip(boundaries[::2], boundaries[1::2], strict=True):
        assert begin["id"] == end["id"]
        assert end["event_count"] == 1
        assert end["data_collections"] == [{"data_collection": TABLE, "event_count": 1}]
    ids = [each["id"] for each in boundaries[::2]]
    assert len(set(ids)) == len(ids)
    assert sorted(ids) == sorted(each["source"]["vgtid"] for each in documents)
    assert [message.key_document for message in messages] == [{"id": each["id"]} for each in boundaries]


def test_transactions_are_spread_over_partitions_each_complete_in_one(
    tmp_path: Path, kafka: EmbeddedKafka, topic_name: str
) -> None:
    sink = {
        "type": "kafka",
        "bootstrap_servers": kafka.bootstrap,
        "topic_prefix": topic_name,
        "partition_by": "transaction",
        "converter": {"type": "json", "schemas_enable": False},
        "topics": [{"tables": [TABLE], "partitions": 3}],
    }
    with FakeVtgate("0") as vtgate:
        file = _pipeline(tmp_path, vtgate, f"  - {json.dumps(sink)}\n")
        tailrace("run", file, "--until-caught-up")
        for number in range(12):
            vtgate.write("0", *((key, number) for key in KEYS))
        tailrace("run", file, "--until-caught-up")
    partitions: dict[str, set[int]] = defaultdict(set)
    for message in read_topic(kafka.bootstrap, f"{topic_name}.{TABLE}"):
        partitions[message.document["source"]["vgtid"]].add(message.partition)
    assert len(partitions) == 12
    assert all(len(found) == 1 for found in partitions.values())
    assert len(set.union(*partitions.values())) > 1
