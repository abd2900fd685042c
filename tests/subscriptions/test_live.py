"""Subscriptions to changes of a real PostgreSQL, end to end, with processes that are killed."""

from __future__ import annotations

import random
import secrets
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.postgres import Database
from tests.support.subscriptions import TOKEN, Returning, ServedPipeline, subscribed
from tests.support.wait import wait_until

TRANSACTIONS = 600


@pytest.fixture
def shop(pg: Database, tmp_path) -> ServedPipeline:
    pg.execute("create table orders(id int primary key, what text, mail text)")
    pg.execute("insert into orders values (1, 'before', 'ada@example.org')")
    return ServedPipeline(tmp_path, pg.dsn)


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_a_client_that_reconnects_after_kills_misses_and_repeats_nothing(shop, pg):
    random_ = random.Random(seed := secrets.randbits(32))
    pg.execute("create table rows(id int primary key, what text)")
    shop.write(in_run=False)
    running = {command: shop.start(command) for command in ("run", "serve")}
    last, numbers = TRANSACTIONS * 3, iter(range(1, TRANSACTIONS * 3 + 1))
    try:
        wait_until((shop.folder / "shop.log" / "identity.json").exists, 120, "the log")
        shop.wait_until_served(running["serve"])
        clients = [
            Returning(shop.port, by_socket=by_socket, last=last, where=where, table="public.row*")
            for by_socket in (False, True)
            for where in ("true", "after.id % 3 = 0")
        ]
        for client in clients:
            client.start()
        writing = threading.Thread(target=_write, args=(pg, numbers, random_.randint(0, 2**32)), daemon=True)
        writing.start()
        wait_until(lambda: all(client.numbers for client in clients), 120, "rows for each")
        # At least once the process that the clients are connected to.
        for victim in ("serve", *random_.choices(("serve", "serve", "run"), k=4)):
            before = len(clients[0].numbers)
            wait_until(lambda: len(clients[0].numbers) > before or not writing.is_alive(), 120, "more rows")  # noqa: B023
            running[victim].kill()
            running[victim].wait(60)
            running[victim] = shop.start(victim)
            shop.wait_until_served(running["serve"])
        for client in clients:
            client.join(180)
    finally:
        for process in running.values():
            process.kill()
            process.wait(60)
    assert [(client.refused, client.failures) for client in clients] == [("", [])] * len(clients), seed
    for number, client in enumerate(clients):
        assert client.numbers == list(range(3, last + 1, 3) if number % 2 else range(1, last + 1)), seed
        assert client.connections > 1


def _write(pg: Database, numbers: Iterator[int], seed: int) -> None:
    random_ = random.Random(seed)
    with pg.connect(autocommit=True) as connection:
        for first in numbers:
            with connection.transaction():
                connection.execute("insert into rows values (%s, 'x')", [first])
                for _ in range(2):
                    connection.execute("insert into rows values (%s, %s)", [next(numbers), "y" * 50])
            if random_.random() < 0.1:
                time.sleep(0.02)


@pytest.mark.timeout(300)
def test_a_run_serves_its_masked_changes_and_ends_in_order(shop, pg):
    shop.source = {"masks": [{"columns": ["public.*.mail"], "method": "fixed", "value": "hidden"}]}
    shop.write(in_run=True)
    process = shop.start("run")
    try:
        shop.wait_until_served(process)
        with subscribed(shop.port, from_=0, table="public.orders") as stream:
            events = iter(stream)
            row = next(events).document
            assert (row["op"], row["source"]["snapshot"]) == ("r", "true")
            assert row["after"] == {"id": 1, "what": "before", "mail": "hidden"}
            with pg.connect() as connection, connection.transaction():
                connection.execute("insert into orders values (2, 'a', 'bob@example.org')")
                connection.execute("update orders set what = 'b' where id = 2")
                connection.execute("delete from orders where id = 1")
            found = [next(events).document for _ in range(3)]
            assert [each["op"] for each in found] == ["c", "u", "d"]
            assert len({each["source"]["txId"] for each in found}) == 1
            assert [each["position"]["ordinal"] for each in found] == [0, 1, 2]
            assert found[1]["after"] == {"id": 2, "what": "b", "mail": "hidden"}
            versions = found[0]["source"]["schema_version"]
            pg.execute("alter table orders add column qty int")
            pg.execute("insert into orders values (3, 'c', 'cy@example.org', 9)")
            after = next(events).document
            assert after["after"] == {"id": 3, "what": "c", "mail": "hidden", "qty": 9}
            assert after["source"]["schema_version"] > versions
            with subscribed(
                shop.port, table="public.orders", where="after.qty > 3 and after.mail = 'hidden'"
            ) as few:
                pg.execute("insert into orders values (4, 'd', 'x', 1), (5, 'e', 'x', 4)")
                assert next(iter(few)).document["after"]["id"] == 5
            pg.execute("truncate orders")
            assert [next(events).document["op"] for _ in range(3)] == ["c", "c", "t"]
            process.send_signal(signal.SIGINT)
            assert list(events) == []
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(60)
    said = (shop.folder / "run.out").read_text()
    assert "changes are served" in said
    assert TOKEN not in said
