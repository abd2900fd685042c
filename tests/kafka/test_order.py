"""The order of a topic's records, however its tables' changes are split, routed and written."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from tailrace.changelog.reader import LogReader
from tailrace.config.kafka import KafkaSinkConfig
from tailrace.config.source.column_policy import ColumnPolicy
from tailrace.converters import factory as converters
from tailrace.decode.column_policy import TablePolicy
from tailrace.decode.json.debezium import SourceInfo
from tailrace.errors import Kind, TailraceError
from tailrace.kafka.client.topics import Topics
from tailrace.kafka.producer.partitioner import Share
from tailrace.kafka.producer.writer import Writer
from tailrace.model import OWN_FORMS
from tailrace.ranges import changes as changes_module
from tailrace.ranges import plan
from tailrace.records import events as events_module
from tailrace.sinks.kafka.records import Form, Records, Sent
from tailrace.sinks.kafka.sink import account_of
from tailrace.sinks.kafka.transactions import TransactionWriter
from tailrace.transforms import factory as transformations
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.examples import seeds
from tests.support.kafka.shares_rig import opened, records, sink_of, write
from tests.support.sinks.rig import relation
from tests.support.spark.wire import INT8, TEXT, HandmadeLog, delete, insert, update

COLUMNS = {"id": INT8, "state": TEXT}
TABLES = [relation(n, f"public.t_{n}", COLUMNS) for n in (1, 2)]

#: A record without its topic: key, operation, row; None and None: a tombstone.
Told = tuple[int, str | None, str | None]

MARKED = {"type": "set_headers", "headers": {"mark": "'1'"}}
COUNTED = {"type": "set_headers", "headers": {"mark": "after.id", "count": "after.id"}}
SPLITS: dict[str, dict[str, Any]] = {
    "an expression": {
        "transformations": [MARKED | {"predicate": "paid"}],
        "predicates": {"paid": {"type": "expression", "where": "after.state like 'paid%'"}},
    },
    "an operation, and then its opposite": {
        "transformations": [MARKED | {"predicate": "new"}, COUNTED | {"predicate": "new", "negate": True}],
        "predicates": {"new": {"type": "operation", "operations": ["create"]}},
    },
    "routes": {"routes": [{"tables": ["public.t_*"], "topic": "{prefix}.t"}]},
    "a transformation": {
        "transformations": [{"type": "route", "regex": r"shop\.public\.t_\d", "replacement": "shop.t"}]
    },
    "routes and an operation": {
        "routes": [{"tables": ["public.t_*"], "topic": "{prefix}.t"}],
        "transformations": [COUNTED | {"predicate": "gone", "negate": True}],
        "predicates": {"gone": {"type": "operation", "operations": ["delete"]}},
    },
}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[HandmadeLog]:
    with HandmadeLog(tmp_path / "log") as written:
        yield written


@pytest.fixture
def no_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Topics exist, with five partitions each and without a limit of their own."""
    monkeypatch.setattr(Topics, "require", lambda *_: None)
    monkeypatch.setattr(Topics, "largest", lambda *_, **__: None)
    monkeypatch.setattr(Topics, "partitions", lambda *_: 5)


class NotedWriter:
    """Records what it is given; refuses one record if asked to."""

    def __init__(self, refused: str = "") -> None:
        self.messages: list[tuple[str, Any, Any, Any, int]] = []
        self._refused = refused

    def send(self, topic: str, events: Any, partitions: Any) -> None:
        count = len(events)
        headers = [{}] * count if events.headers is None else events.headers.to_pylist()
        values = [None if each.as_py() is None else json.loads(each.as_py()) for each in events.values]
        for row, value in enumerate(values):
            if value and self._refused and self._refused in str(value):
                raise TailraceError(Kind.SINK_WRITE_FAILED, "send a record", context={"row": row})
        keys = [json.loads(each.as_py()) for each in events.keys]
        self.messages += zip([topic] * count, keys, values, headers, partitions.tolist(), strict=True)

    def told(self) -> dict[str, list[Told]]:
        found: dict[str, list[Told]] = defaultdict(list)
        for topic, key, value, *_ in self.messages:
            row = value and value["after"]
            found[topic].append((key["id"], value and value["op"], row and row["state"]))
        return found


def records_of(**more: Any) -> Records:
    config = KafkaSinkConfig.model_validate(
        {"type": "kafka", "name": "out", "bootstrap_servers": "localhost:1", "topic_prefix": "shop",
         "converter": {"type": "json", "schemas_enable": False}, **more}
    )  # fmt: skip
    form = Form(
        config,
        converters.build("json", config.converter_options()),
        transformations.build(config.transformations, config.predicates, splits_updates=True),
        "shop",
        SourceInfo("shop", "shop", "1", "postgresql"),
        TablePolicy.of(ColumnPolicy()),
        OWN_FORMS,
    )
    return Records(form, account_of(config, "shop"))


def sent(log: HandmadeLog, end: int, share: Share | None = None, **more: Any) -> NotedWriter:
    writer = NotedWriter()
    with LogReader.open(log.path, "0") as reader:
        splits = plan.input_splits("0", reader.blocks(0, end), 0, end)
        for outgoing in records_of(**more).outgoing(reader, splits, 0, end, Sent(share)):
            outgoing.send(cast(Writer, writer))
    return writer


def history(log: HandmadeLog, seed: int, transactions: int = 60) -> tuple[int, dict[str, list[Told]]]:
    """Write rows that are inserted, changed, moved to the other table and deleted.

    Return the end, and the expected content of topics of one table or of both.
    """
    choose = random.Random(seed)
    held: dict[int, int] = {}  # by key: the table of the row
    told: dict[str, list[Told]] = {"t_1": [], "t_2": [], "t": []}
    end = 0

    def tell(table: int, *given: Told) -> None:
        for name in (f"t_{table}", "t"):
            told[name] += given

    for number in range(transactions):
        changes = [] if number else list(TABLES)
        for _ in range(choose.randint(1, 6)):
            key, state = choose.randint(1, 4), f"{choose.choice(['new', 'paid'])} {len(told['t'])}"
            table, what = held.get(key), choose.random()
            if table is not None and what < 0.4:
                changes.append(update(table, key, state))
                tell(table, (key, "u", state))
                continue
            if table is not None:
                changes.append(delete(table, key, None))
                tell(table, (key, "d", None), (key, None, None))
                del held[key]
            if table is None or what < 0.8:
                held[key] = choose.randint(1, 2)
                changes.append(insert(held[key], key, state))
                tell(held[key], (key, "c", state))
        end = log.commit(*changes)
    return end, told


@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize("seed", seeds(3, quick=1))
@pytest.mark.parametrize("records_at_once", [1, 10_000])
def test_a_topic_gets_the_records_of_all_its_groups_in_the_order_of_the_log(
    log: HandmadeLog,
    no_broker: None,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    seed: int,
    records_at_once: int,
) -> None:
    monkeypatch.setattr(events_module, "_COLUMN_BYTES", events_module.CONVERTED_BYTES // records_at_once)
    end, told = history(log, seed)
    share_a_topic = "rout" in how or "transformation" in how
    expected = {name: told[name] for name in (["t"] if share_a_topic else ["t_1", "t_2"])}
    writer = sent(log, end, **SPLITS[how])
    found = {topic.rpartition(".")[2]: rows for topic, rows in writer.told().items()}
    assert found == expected
    partitions = defaultdict(set)
    for _, key, value, headers, partition in writer.messages:
        partitions[key["id"]].add(partition)
        if how == "an expression":
            paid = bool(value and value["after"] and value["after"]["state"].startswith("paid"))
            assert (headers.get("mark") == "1") == paid
    assert all(len(found) == 1 for found in partitions.values())
    by_share = [sent(log, end, Share(number, 3), **SPLITS[how]).told() for number in range(3)]
    for topic, rows in writer.told().items():
        for key in range(1, 5):
            of_key = [[told for told in share[topic] if told[0] == key] for share in by_share]
            assert sorted(of_key)[:2] == [[], []]
            assert sorted(of_key)[2] == [told for told in rows if told[0] == key]


@pytest.mark.parametrize("records_at_once", [1, 10_000])
@pytest.mark.parametrize("parted", [{}, {"predicate": "new"}, {"predicate": "new", "negate": True}])
def test_the_two_records_of_a_changed_key_keep_their_order_and_have_each_others_key(
    log: HandmadeLog,
    no_broker: None,
    monkeypatch: pytest.MonkeyPatch,
    parted: dict[str, Any],
    records_at_once: int,
) -> None:
    monkeypatch.setattr(events_module, "_COLUMN_BYTES", events_module.CONVERTED_BYTES // records_at_once)
    end = log.commit(
        TABLES[0], insert(1, 1, "new"), update(1, 2, "paid", key=(1, None)),
        update(1, 3, "new", key=(2, None)), update(1, 3, "paid"), delete(1, 3, None),
    )  # fmt: skip
    steps = {
        "transformations": [
            {"type": "add_fields", "static": {"of": "shop"}, "apply_to": "key"},
            {"type": "set_headers", "headers": {"mark": "'1'"}, **parted},
        ],
        "predicates": {"new": {"type": "operation", "operations": ["create"]}},
    }
    keys = [json.dumps({"id": key, "of": "shop"}, separators=(",", ":")) for key in range(4)]
    expected = [
        (1, "c", {}),
        (1, "d", {"__debezium.newkey": keys[2]}),
        (1, None, {"__debezium.newkey": keys[2]}),
        (2, "c", {"__debezium.oldkey": keys[1]}),
        (2, "d", {"__debezium.newkey": keys[3]}),
        (2, None, {"__debezium.newkey": keys[3]}),
        (3, "c", {"__debezium.oldkey": keys[2]}),
        (3, "u", {}),
        (3, "d", {}),
        (3, None, {}),
    ]

    def told(share: Share | None) -> list[tuple[int, str | None, dict[str, str]]]:
        found = sent(log, end, share, **steps).messages
        return [(key["id"], value and value["op"], others(headers)) for _, key, value, headers, _ in found]

    def others(headers: dict[str, str | None]) -> dict[str, str]:
        return {name: key for name, key in headers.items() if key is not None and name != "mark"}

    if parted:  # records separated by a predicate do not have each other's key
        assert [one[:2] for one in told(None)] == [one[:2] for one in expected]
        return
    assert told(None) == expected
    by_share = [told(Share(number, 3)) for number in range(3)]
    for key in range(1, 4):
        found = [[one for one in share if one[0] == key] for share in by_share]
        assert sorted(found, key=len)[2] == [one for one in expected if one[0] == key]
        assert sum(map(len, found)) == len(sorted(found, key=len)[2])


@pytest.mark.parametrize("how", ["an expression", "routes"])
def test_each_transaction_of_a_split_topic_is_committed_in_its_order(
    log: HandmadeLog, no_broker: None, how: str
) -> None:
    end, _ = history(log, 5)
    expected = sent(log, end, **SPLITS[how]).told()
    writer, commits = NotedWriter(), []
    with LogReader.open(log.path, "0") as reader:
        TransactionWriter("0", records_of(**SPLITS[how])).write(
            cast(Writer, writer), reader, 0, end, Sent(), commits.append
        )
        assert commits == reader.boundaries(0, end).tolist()
    assert writer.told() == expected


def test_a_topic_name_computed_from_a_value_is_made_valid_for_kafka(
    log: HandmadeLog, no_broker: None
) -> None:
    end = log.commit(*TABLES, insert(1, 1, "größe/XL"), insert(2, 2, "S"))
    route = {"type": "route", "topic": "'shop/' || after.state"}
    found = sent(log, end, transformations=[route]).told()
    assert found == {"shop_gr__e_XL": [(1, "c", "größe/XL")], "shop_S": [(2, "c", "S")]}


@pytest.mark.parametrize("by", ["key", "transaction"])
def test_events_of_an_outbox_are_in_the_partitions_that_their_rows_name(
    log: HandmadeLog, no_broker: None, by: str
) -> None:
    columns = {"id": INT8, "payload": TEXT, "part": INT8}
    outbox = relation(1, "public.outbox", columns)
    rows = [(1, "a", 4), (2, "b", None), (3, "c", 0)]
    end = log.commit(outbox, *(insert(1, *row) for row in rows))
    names = {"event_key": "payload", "route_by": "payload", "route_topic_replacement": "all"}
    named = {"additional": ["part:partition"]}

    def placed(step: dict[str, Any], upto: int = end) -> dict[str, int]:
        found = sent(log, upto, partition_by=by, transformations=[{"type": "outbox", **names, **step}])
        return {key: place for _, key, *_, place in found.messages}

    usual, found = placed({}), placed(named)
    assert found == {"a": 4, "b": usual["b"], "c": 0}
    end = log.commit(insert(1, 4, "d", 5))
    with pytest.raises(TailraceError, match="partition 5 of 'all': the topic has 5") as caught:
        placed(named, end)
    assert caught.value.kind is Kind.SINK_MISCONFIGURED
    assert caught.value.context["table"] == "public.outbox"


@pytest.mark.parametrize("share", [None, Share(0, 2)])
def test_two_tables_that_would_share_a_topic_are_refused_even_if_only_one_has_changes(
    log: HandmadeLog, no_broker: None, share: Share | None
) -> None:
    customers, goods = relation(1, "public.顧客", COLUMNS), relation(2, "public.商品", COLUMNS)
    first = log.commit(customers, insert(1, 1, "new"))
    assert set(sent(log, first, share).told()) == {"shop.public.__"}
    end = log.commit(goods, insert(2, 2, "new"))
    with pytest.raises(TailraceError, match="is that of '顧客' in schema 'public'"):
        sent(log, first, share)  # before anything is written

    def send_the_second(**more: Any) -> dict[str, list[Told]]:
        writer = NotedWriter()
        with LogReader.open(log.path, "0") as reader:
            splits = plan.input_splits("0", reader.blocks(first, end), first, end)
            for outgoing in records_of(**more).outgoing(log.path, splits, first, end, Sent(share)):
                outgoing.send(cast(Writer, writer))
        return writer.told()

    with pytest.raises(TailraceError, match="is that of '顧客' in schema 'public'") as caught:
        send_the_second()
    assert caught.value.kind is Kind.SINK_MISCONFIGURED
    route = {"tables": ["public.商品"], "topic": "{prefix}.goods"}
    assert set(send_the_second(routes=[route])) <= {"shop.goods"}
    assert set(send_the_second(tables=["public.商品"])) <= {"shop.public.__"}


def test_the_error_of_a_refused_record_names_its_table_and_position(
    log: HandmadeLog, no_broker: None
) -> None:
    log.commit(*TABLES, insert(1, 1, "one"), insert(2, 2, "two"), insert(1, 3, "three"))
    end = log.commit(insert(2, 4, "four"), insert(1, 5, "five"))
    with LogReader.open(log.path, "0") as reader:
        splits = plan.input_splits("0", reader.blocks(0, end), 0, end)
        (outgoing,) = records_of(**SPLITS["routes"]).outgoing(reader, splits, 0, end, Sent())
    assert [table.relation and table.relation.table for table in outgoing.tables] == ["t_1", "t_2"]
    for number, (state, table, lsn) in enumerate(
        [("one", "t_1", 1100), ("two", "t_2", 1100), ("three", "t_1", 1100), ("four", "t_2", 1200)]
    ):
        with pytest.raises(TailraceError) as caught:
            outgoing.send(cast(Writer, NotedWriter(state)))
        assert caught.value.context == {
            "table": f"public.{table}", "log_offset": outgoing.log_offset[number], "commit_lsn": f"0/{lsn:X}",
        }  # fmt: skip


def test_changes_that_are_split_keep_their_numbers_in_transaction_and_table(
    log: HandmadeLog, no_broker: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes_module, "DECODED_BYTES_MAX", 1)
    wider = relation(1, "public.t_1", {**COLUMNS, "more": TEXT})
    whole = log.transaction(
        *TABLES, insert(1, 1, "new"), insert(2, 2, "new"), update(1, 1, "paid"), insert(1, 3, "new"),
        wider, insert(1, 4, "paid", "more"), update(2, 2, "paid"), insert(1, 5, "new", "more"),
    )  # fmt: skip
    middle = whole.index(wider)
    log.append(whole[:middle])
    log.writer.sync()
    log.append(whole[middle:])
    end = log.commit(insert(1, 6, "new", None), insert(2, 7, "paid"))
    expected = {1: [1, 2], 2: [1, 2], 3: [3], 4: [4], 5: [5], 6: [1], 7: [1]}
    of_shared = SPLITS["routes"] | SPLITS["an expression"]
    for split in (*SPLITS.values(), of_shared):
        numbers, places = defaultdict(list), []
        for _, key, value, *_ in sent(log, end, provide_transaction_metadata=True, **split).messages:
            numbers[key["id"]].append(value["transaction"]["data_collection_order"])
            places.append((value["source"]["txId"], value["transaction"]["total_order"]))
        assert numbers == expected
        assert sorted(places) == [(701, n) for n in range(1, 8)] + [(702, 1), (702, 2)]


@pytest.mark.parametrize(("producers", "atomic"), [(0, True), (0, False), (2, True), (2, False)])
def test_consumers_get_each_key_in_order_with_any_number_of_producers(
    kafka: EmbeddedKafka, topic_name: str, log: HandmadeLog, producers: int, atomic: bool
) -> None:
    end, told = history(log, 7)
    split = SPLITS["an expression"]
    chain = transformations.build(split["transformations"], split["predicates"])
    routes = [{"tables": ["public.t_*"], "topic": "{prefix}.t"}]
    sink = opened(
        sink_of(kafka, topic_name, producers, chain=chain, routes=routes, atomic_source_offset_commit=atomic),
        log,
    )
    write(sink, log, end)
    sink.close()
    found: dict[int, list[Told]] = defaultdict(list)
    for key, value in records(kafka, f"{topic_name}.t"):
        of_key, event = json.loads(key or b"")["id"], json.loads(value) if value else None
        row = event and event["after"]
        found[of_key].append((of_key, event and event["op"], row and row["state"]))
    assert found == {key: [each for each in told["t"] if each[0] == key] for key in found}
    assert sum(map(len, found.values())) == len(told["t"])
