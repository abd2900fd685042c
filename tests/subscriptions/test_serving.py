"""Subscriptions over HTTP to a log written by hand: events, positions, and what is refused."""

from __future__ import annotations

import errno
import gc
import http.client
import importlib.metadata
import json
import re
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from tailrace.changelog.disclosure import keep_disclosure, keep_renames
from tailrace.changelog.retention.policy import RetentionRules
from tailrace.changelog.retention.prune import apply
from tailrace.config import ColumnMask, ColumnPolicy
from tailrace.config.load import from_mapping
from tailrace.config.sections import SubscriptionsConfig
from tailrace.errors import Kind, TailraceError
from tailrace.protocol.renames import Renames
from tailrace.subscriptions import app, hub, served_log
from tailrace.subscriptions.filters import ChangeFilter
from tailrace.subscriptions.served_log import ServedLog, places_in, places_of
from tailrace.subscriptions.server import serving
from tests.support import orders_log
from tests.support.orders_log import OID, LogOfOrders
from tests.support.subscriptions import TOKEN, changes, ids, refused, socket_to, subscribed
from tests.support.wait import wait_until


@pytest.fixture(autouse=True)
def _token(monkeypatch):
    monkeypatch.setenv("TAILRACE_TOKEN", TOKEN)


@pytest.fixture
def orders(tmp_path) -> Iterator[LogOfOrders]:
    log = LogOfOrders(tmp_path / "log", segment_bytes=64 * 1024)
    log.insert(1, 2, 3)
    yield log
    log.close()


@contextmanager
def served(orders: LogOfOrders, **settings) -> Iterator[int]:
    with serving(places_in(orders.directory.path), SubscriptionsConfig(port=0, **settings)) as port:
        yield port


@pytest.fixture
def port(orders) -> Iterator[int]:
    with served(orders) as port:
        yield port


# ------------------------------------------------------------------ events and positions


def test_an_event_has_the_form_of_tail_and_the_position_after_it(orders, port):
    with subscribed(port, from_=0) as stream:
        events = list(islice(stream, 3))
    assert [event.document["after"]["id"] for event in events] == [1, 2, 3]
    assert stream.retry_ms == 1000
    for event in events:
        offset, _, mark = event.id.partition("@")
        assert int(offset) == event.document["position"]["log_offset"] + 1
        assert mark == orders.directory.identity.log_id[:8]


def test_without_a_position_a_subscription_begins_with_the_next_commit(orders, port):
    with subscribed(port) as stream:
        orders.insert(4)
        assert ids(stream, 1) == [4]


def test_a_client_that_reconnects_continues_after_its_last_event_within_a_transaction(orders, port):
    with subscribed(port, from_=0) as stream:
        assert ids(stream, 2) == [1, 2]
    last = stream.id
    orders.insert(4)
    with subscribed(port, from_=0, last_event_id=last) as again:
        assert ids(again, 2) == [3, 4]
    with subscribed(port, from_=last) as by_parameter:
        assert ids(by_parameter, 2) == [3, 4]


def test_the_position_is_known_before_the_first_event(orders, port):
    with subscribed(port) as stream:
        lines = stream.lines
        first = [next(lines) for _ in range(2)]
    orders.insert(4)
    with subscribed(port, last_event_id=first[1].removeprefix("id: ")) as again:
        assert ids(again, 1) == [4]


def test_a_websocket_gets_each_change_with_the_position_after_it(orders, port):
    with socket_to(port, from_=0) as connection:
        first = json.loads(connection.recv(timeout=60))
        assert first == {"from": f"0@{orders.directory.identity.log_id[:8]}"}
        found = changes(connection, 2)
    assert [message["change"]["after"]["id"] for message in found] == [1, 2]
    with socket_to(port, from_=found[-1]["from"], table="public.orders") as connection:
        orders.insert(4)
        assert [message["change"]["after"]["id"] for message in changes(connection, 2)] == [3, 4]


def test_only_matching_changes_come_from_the_log_and_at_its_head(orders, port):
    def some(query) -> list[int]:
        with subscribed(port, from_=0, **query) as stream:
            return ids(stream, 2)

    queries = [
        {"table": "public.orders", "where": "after.id in (2, 5)"},
        {"table": ["nothing.*", "public.*"], "where": "after.id = 2 or after.id > 4"},
        {"where": "after.id % 3 = 2"},
    ]
    with ThreadPoolExecutor(len(queries)) as pool:
        found = [pool.submit(some, query) for query in queries]
        for number in (4, 5):
            orders.insert(number)
        assert [each.result(60) for each in found] == [[2, 5]] * 3


def test_a_heartbeat_moves_the_position_if_no_change_matches(orders, monkeypatch):
    monkeypatch.setattr(hub.Hub.__init__, "__kwdefaults__", {"heartbeat_s": 0.05})
    with served(orders) as port:
        with subscribed(port, where="after.id = 5") as stream:
            lines = stream.lines
            begin = [next(lines) for _ in range(2)][1]
            end = orders.insert(4)
            said = wait_until(
                lambda: (line := next(lines)).startswith(f"id: {end}@") and line, 30, "a heartbeat"
            )
        assert said != begin
        with socket_to(port, where="after.id = 5") as connection:
            wait_until(lambda: json.loads(connection.recv(timeout=30))["from"].startswith(f"{end}@"), 30)


@pytest.mark.slow
def test_each_change_of_a_log_that_rolls_comes_once_in_order(orders, port):
    with subscribed(port) as stream, socket_to(port, where="after.id > 10") as connection:
        for number in range(10, 1500):
            orders.insert(number)
        assert ids(stream, 1490) == list(range(10, 1500))
        assert [each["change"]["after"]["id"] for each in changes(connection, 1489)] == list(range(11, 1500))
    assert len(orders.directory.segments("0")) > 2


@pytest.mark.slow
def test_a_client_far_behind_gets_the_log_in_parts_and_then_the_head(orders, port, monkeypatch):
    monkeypatch.setattr(served_log, "PART_BYTES_MAX", 2000)
    numbers = list(range(10, 3000))
    orders.insert(*numbers[:1500])
    for at in range(1500, len(numbers), 100):
        orders.insert(*numbers[at : at + 100])
    with subscribed(port, from_=0) as stream, subscribed(port, from_=0, where="after.id % 500 = 0") as few:
        assert ids(stream, len(numbers) + 3) == [1, 2, 3, *numbers]
        orders.insert(5000)
        assert ids(stream, 1) == [5000]
        assert ids(few, 6) == [500, 1000, 1500, 2000, 2500, 5000]


def test_a_change_larger_than_a_part_is_sent_whole(orders, port, monkeypatch):
    monkeypatch.setattr(served_log, "PART_BYTES_MAX", 1)
    monkeypatch.setattr(hub, "SENT_BYTES_MAX", 1)
    with subscribed(port, from_=0) as stream:
        orders.insert(4)
        assert ids(stream, 4) == [1, 2, 3, 4]


# ------------------------------------------------------------------ slow clients, many clients, ends


@pytest.mark.slow
def test_a_client_that_does_not_read_blocks_no_other_and_gets_everything_later(orders, monkeypatch):
    monkeypatch.setattr(hub, "RING_BYTES_MAX", 100_000)
    # About 17 MB of JSON: more than the ring and the buffers on the way hold.
    with served(orders) as port, socket.create_connection(("127.0.0.1", port)) as slow:
        ask(slow)
        with subscribed(port) as fast:
            for at in range(10, 30_010, 100):
                orders.insert(*range(at, at + 100))
            assert ids(fast, 30_000) == list(range(10, 30_010))
        slow.settimeout(60)
        answer = http.client.HTTPResponse(slow)
        answer.begin()
        assert answer.status == 200
        found: list[int] = []
        while len(found) < 30_003:
            line = answer.readline()
            assert line, "it has ended"
            if line.startswith(b"data: "):
                found.append(json.loads(line[6:])["after"]["id"])
    assert found == [1, 2, 3, *range(10, 30_010)]


@pytest.mark.slow
def test_a_client_that_does_not_read_for_too_long_is_disconnected(orders, monkeypatch):
    monkeypatch.setattr(app.ChangesEndpoint.__init__, "__kwdefaults__", {"send_deadline_s": 0.2})
    with served(orders, subscribers_max=1) as port, socket.create_connection(("127.0.0.1", port)) as slow:
        ask(slow)
        for at in range(10, 30_010, 100):
            orders.insert(*range(at, at + 100))
        wait_until(lambda: _is_served(port), 60, "its place")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux ends such connections")
def test_the_connection_of_a_client_that_does_not_read_ends_although_its_buffer_is_full(orders, monkeypatch):
    monkeypatch.setattr(app.ChangesEndpoint.__init__, "__kwdefaults__", {"send_deadline_s": 0.2})
    monkeypatch.setattr(app, "SEND_DEADLINE_S", 0.2)
    for at in range(10, 30_010, 1000):
        orders.insert(*range(at, at + 1000))
    with served(orders) as port:
        before = _connections(port)
        with socket.create_connection(("127.0.0.1", port)) as slow:
            ask(slow)
            wait_until(lambda: _connections(port) > before, 60, "a connection")
            wait_until(lambda: _connections(port) == before, 60, "its end")


def _connections(port: int) -> int:
    """Return the server's number of connections: established ones on its port, according to Linux."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(fields[1].endswith(f":{port:04X}") and fields[3] == "01" for fields in lines)


def ask(slow: socket.socket) -> None:
    """Subscribe from the log's start, and read nothing."""
    slow.sendall(f"GET /changes?from=0 HTTP/1.0\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())


def _is_served(port: int) -> bool:
    try:
        with subscribed(port):
            return True
    except AssertionError:
        return False


@pytest.mark.follows("subscribers_exceeded")
@pytest.mark.slow
def test_more_subscribers_than_allowed_are_refused_until_one_ends(orders):
    with served(orders, subscribers_max=2) as port:
        with subscribed(port), socket_to(port):
            status, error = refused(port)
            assert (status, error["kind"]) == (503, "subscribers_exceeded")
            assert error["context"] == {"subscribers_max": 2}
            with pytest.raises(InvalidStatus) as raised, socket_to(port):
                pass
            assert raised.value.response.status_code == 503
        wait_until(lambda: _is_served(port), 30, "a free place")
    with (
        served(orders, subscribers_max=3) as port,
        subscribed(port),
        subscribed(port),
        subscribed(port) as third,
    ):
        orders.insert(4)
        assert ids(third, 1) == [4]


def test_the_end_of_the_server_ends_every_stream_in_order(orders):
    with ExitStack() as clients:
        with served(orders) as port:
            stream = clients.enter_context(subscribed(port, from_=0))
            connection = clients.enter_context(socket_to(port, from_=0))
            assert ids(stream, 3) == [1, 2, 3]
            changes(connection, 3)
        assert list(stream) == []
        with pytest.raises(ConnectionClosed):
            connection.recv(timeout=30)
        assert connection.close_code == 1001


def test_without_subscribers_the_log_is_not_read(orders, port):
    def threads() -> list[str]:
        return [each.name for each in threading.enumerate() if each.name == "subscriptions"]

    with subscribed(port) as stream:
        orders.insert(4)
        assert ids(stream, 1) == [4]
        assert threads()
    wait_until(lambda: not threads(), 30, "the end of the thread")


def test_a_filter_is_forgotten_once_its_last_subscriber_is_gone(orders, port):
    where = "after.id = 5 and 'nobody' = 'nobody'"
    with subscribed(port) as stays:
        orders.insert(4)
        assert ids(stays, 1) == [4]
        place = stays.id
        orders.insert(5)
        assert ids(stays, 1) == [5]
        with subscribed(port, from_=place, where=where) as leaves:
            assert ids(leaves, 1) == [5]
            assert _filters(where)
        orders.insert(6)
        assert ids(stays, 1) == [6]
        wait_until(lambda: not _filters(where), 30, "its end")


def _filters(where: str) -> list[ChangeFilter]:
    return [one for one in gc.get_objects() if type(one) is ChangeFilter and one.where == where]


# ------------------------------------------------------------------ what is refused, and the hints


@pytest.mark.follows("subscription_unauthorized")
def test_requests_without_the_token_are_refused_and_each_way_to_send_it_works(orders, port):
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": TOKEN},
        {"Cookie": "tailrace_token=x"},
    ):
        status, error = refused(port, headers=headers, table="no.such", nonsense="x")
        assert (status, error["kind"]) == (401, "subscription_unauthorized")
    with pytest.raises(InvalidStatus) as raised, connect(f"ws://127.0.0.1:{port}/changes", proxy=None):
        pass
    assert raised.value.response.status_code == 401
    with subscribed(port, from_=0) as by_header:
        assert ids(by_header, 1) == [1]
    assert refused(port, headers={"Cookie": f'tailrace_token="{TOKEN}"'}, table="no.such")[0] == 404
    assert refused(port, headers={}, token=TOKEN, table="no.such")[0] == 404


@pytest.mark.follows("subscription_forbidden")
def test_pages_of_other_sites_are_refused_until_they_are_allowed(orders, port):
    site = {"Origin": "http://localhost:3000", "Authorization": f"Bearer {TOKEN}"}
    status, error = refused(port, headers=site)
    assert (status, error["kind"]) == (403, "subscription_forbidden")
    assert "--origin http://localhost:3000" in error["hint"]
    _, error = refused(port, headers=site | {"Origin": "null"})
    assert "serve the page over HTTP" in error["hint"]
    with pytest.raises(InvalidStatus) as raised, socket_to(port, origin="http://localhost:3000"):
        pass
    assert raised.value.response.status_code == 403
    with served(orders, origins=("http://localhost:3000",)) as allowed:
        with socket_to(allowed, from_=0, origin="http://localhost:3000") as connection:
            assert len(changes(connection, 3)) == 3
        client = http.client.HTTPConnection("127.0.0.1", allowed, timeout=60)
        client.request("GET", "/changes?from=0", headers=site)
        answer = client.getresponse()
        assert answer.status == 200
        assert answer.headers["access-control-allow-origin"] == "http://localhost:3000"
        client.close()


def test_the_token_is_in_no_log_line(orders, capfd):
    with served(orders) as port:
        refused(port, headers={}, token="wrong and secret")
        with subscribed(port, from_=0, token=TOKEN) as stream:
            assert ids(stream, 1) == [1]
        with socket_to(port, from_=0, token=TOKEN) as connection:
            changes(connection, 1)
    shown = "".join(capfd.readouterr())
    assert "changes are served" in shown
    assert "token" not in shown
    assert "secret" not in shown


@pytest.mark.parametrize(
    ("query", "status", "kind", "said"),
    [
        ({"tabel": "public.orders"}, 400, "config_invalid", "no parameter 'tabel'"),
        ({"source": "shop"}, 400, "config_invalid", "no source 'shop'"),
        ({"table": "orders"}, 400, "config_invalid", "'orders' is not of the form schema.table"),
        ({"table": "/(.*a)*b/"}, 400, "config_invalid", "a regular expression"),
        ({"from_": "yesterday"}, 400, "config_invalid", "'yesterday'"),
        ({"from_": ["1", "2"]}, 400, "config_invalid", "twice"),
        ({"from_": "100000000"}, 400, "log_range_invalid", "the log ends"),
        ({"from_": "12@01234567"}, 410, "offsets_foreign", "another log"),
        ({"where": "after.id >"}, 400, "config_invalid", "at character"),
        ({"where": "id > 3"}, 400, "config_invalid", "id"),
        ({"table": "public.orders", "where": "after.qty > 3"}, 400, "config_invalid", "'qty'"),
        ({"table": "public.orders", "where": "after.what > 3"}, 400, "config_invalid", "cast one"),
        ({"table": "public.order"}, 404, "table_unknown", "public.orders"),
    ],
)
def test_a_wrong_request_is_refused_with_a_status_and_a_kind(port, query, status, kind, said):
    found, error = refused(port, **query)
    assert (found, error["kind"]) == (status, kind)
    assert said in error["message"] + error["hint"]


def test_other_paths_and_methods_are_refused(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for method, path, status in (("GET", "/", 404), ("POST", "/changes", 405), ("HEAD", "/changes", 405)):
        connection.request(method, path, headers={"Authorization": f"Bearer {TOKEN}"})
        answer = connection.getresponse()
        answer.read()
        assert answer.status == status
    connection.close()


def retained(orders: LogOfOrders) -> LogOfOrders:
    for at in range(10, 4000, 100):
        orders.insert(*range(at, at + 100))
    assert apply(orders.directory, "0", RetentionRules(size_bytes=1)).segments
    return orders


@pytest.mark.slow
def test_a_position_removed_by_retention_is_refused_with_the_oldest_one(orders, port):
    with subscribed(port, from_=0) as stream:
        assert ids(stream, 1) == [1]
    retained(orders)
    for where in ("", "after.id > 3"):
        status, error = refused(port, from_=stream.id, where=where)
        assert (status, error["kind"]) == (410, "log_range_gone")
        with subscribed(port, from_=error["context"]["oldest"]) as again:
            assert next(iter(again)).document["after"]["id"] > 3


def test_a_client_that_retention_overtakes_gets_the_oldest_position_too(orders):
    [place] = places_in(orders.directory.path)
    log = ServedLog(place)
    at = log.begin("0")
    retained(orders)
    with pytest.raises(TailraceError) as raised:
        log.read(at, ChangeFilter())
    assert raised.value.kind is Kind.LOG_RANGE_GONE
    oldest = raised.value.context["oldest"]
    assert f"subscribe from {oldest}" in raised.value.hint
    assert log.begin(oldest) > at
    log.close()


def test_a_position_that_the_end_mark_does_not_show_after_a_loss_of_power_is_continued(orders):
    """It is in the log's files: capture finds the end when it opens the log."""
    with orders.power_lost():
        first = orders.insert(4)
        end = orders.insert(5)
    mark = orders.directory.identity.log_id[:8]
    with (
        served(orders) as port,
        subscribed(port, last_event_id=f"{first}@{mark}") as stream,
        subscribed(port, from_=f"{end}@{mark}", where="after.id > 5") as few,
    ):
        assert refused(port, from_=f"{end + 1}@{mark}")[1]["kind"] == "offsets_foreign"
        assert refused(port, from_=f"{'9' * 5000}@{mark}")[1]["kind"] == "offsets_foreign"
        orders.open_again()
        orders.insert(6)
        assert ids(stream, 2) == [5, 6]
        assert ids(few, 1) == [6]


def test_a_former_name_of_a_table_selects_the_changes_from_before_its_renaming(orders, port, monkeypatch):
    renamed = orders_log.relation().replace(b"orders", b"things")
    monkeypatch.setattr(orders_log, "relation", lambda: renamed)
    orders.insert(4)
    for where in ("", "after.id > 1"):
        with subscribed(port, from_=0, table="public.orders", where=where) as stream:
            assert ids(stream, 1) == [2 if where else 1]
    assert refused(port, table="public.order")[1]["kind"] == "table_unknown"


def test_a_file_whose_masks_capture_has_not_taken_yet_is_not_served(tmp_path):
    """Only capture can ask the server for the names that a masked column has had."""
    log = LogOfOrders(tmp_path / "log")
    log.insert(1)
    masks = [{"columns": ["public.orders.later"], "method": "fixed"}]
    source = {"type": "postgresql", "dsn": "host=127.0.0.1 port=1", "masks": masks}
    pipeline = from_mapping({"name": "shop", "source": source, "log": {"path": str(tmp_path / "log")}})
    rules = pipeline.pipelines[0].source.disclosure
    with serving(places_of(pipeline), SubscriptionsConfig(port=0)) as port:
        status, error = refused(port, from_=0)
        assert (status, error["kind"]) == (503, "schema_pending")
        assert "start `tailrace run` with this file" in error["hint"]
        names = Renames({OID: {"what": (("public", "orders", "what"), ("public", "orders", "later"))}})
        # As capture does, once the server has said that the column is named otherwise now.
        keep_renames(log.directory, "0", names)
        keep_disclosure(log.directory, "0", rules)
        with subscribed(port, from_=0) as stream:
            assert next(iter(stream)).document["after"] == {"id": 1, "what": "****"}
            keep_disclosure(log.directory, "0", ColumnPolicy())  # it runs with another file
            assert refused(port)[0] == 503
            log.insert(2)
            keep_disclosure(log.directory, "0", rules)
            assert next(iter(stream)).document["after"] == {"id": 2, "what": "****"}
    log.close()


def test_masks_apply_from_the_moment_that_capture_records_them(orders, port):
    rules = ColumnPolicy(masks=(ColumnMask(columns=("public.*.what",), method="fixed", value="hidden"),))
    with subscribed(port, from_=0) as stream, subscribed(port, where="after.what = 'hidden'") as few:
        assert next(iter(stream)).document["after"]["what"] == "thing"
        assert ids(stream, 2) == [2, 3]
        keep_disclosure(orders.directory, "0", rules)
        orders.insert(4)
        assert next(iter(stream)).document["after"] == {"id": 4, "what": "hidden"}
        with subscribed(port, from_=0) as behind:
            assert {event.document["after"]["what"] for event in islice(behind, 4)} == {"hidden"}
        assert ids(few, 1) == [4]  # expressions see the masked values


def test_an_expression_that_does_not_fit_a_later_table_ends_the_subscription_with_an_error(orders, port):
    with (
        subscribed(port, where="after.qty > 3") as stream,
        socket_to(port, where="after.qty > 3") as connection,
    ):
        orders.insert(4)
        failure = next(iter(stream))
        assert failure.kind == "failure"
        assert failure.document["error"]["kind"] == "config_invalid"
        assert "qty" in failure.document["error"]["message"]
        assert list(stream) == []
        assert json.loads(connection.recv(timeout=30)).keys() == {"from"}
        assert json.loads(connection.recv(timeout=30))["error"]["kind"] == "config_invalid"
        with pytest.raises(ConnectionClosed):
            connection.recv(timeout=30)
        assert connection.close_code == 1011


def test_an_unreadable_file_ends_the_subscription_with_a_logged_error(orders, port, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(served_log.ServedLog, "read", fail)
    with (
        capture_logs() as logs,
        subscribed(port, from_=0) as stream,
        socket_to(port, from_=0) as connection,
    ):
        [failure] = stream
        assert failure.kind == "failure"
        assert "Too many open files" in failure.document["error"]["message"]
        assert json.loads(connection.recv(timeout=30)).keys() == {"from"}
        assert json.loads(connection.recv(timeout=30)) == failure.document
    assert [entry["event"] for entry in logs] == ["a subscription ended with an error"] * 2
    monkeypatch.setattr(served_log.ServedLog, "begin", fail)
    status, error = refused(port)
    assert (status, error) == (500, failure.document["error"])


def test_a_subscription_names_one_of_several_sources(tmp_path):
    logs = [LogOfOrders(tmp_path / "root" / name) for name in ("east", "west")]
    with ExitStack() as stack:
        for number, log in enumerate(logs):
            stack.callback(log.close)
            log.insert(number)
        port = stack.enter_context(serving(places_in(tmp_path / "root"), SubscriptionsConfig(port=0)))
        status, error = refused(port)
        assert (status, error["hint"]) == (400, "name one with source: east, west")
        with subscribed(port, source="west", from_=0) as stream:
            assert ids(stream, 1) == [1]


@pytest.mark.parametrize(
    "source",
    [
        {"type": "postgresql", "dsn": "host=127.0.0.1 port=1", "tables": ["shop.*"]},
        {"type": "vitess", "hosts": ["127.0.0.1:1"], "keyspace": "shop", "tables": ["shop.*"]},
    ],
    ids=["postgres", "vitess"],
)
def test_a_captured_table_may_be_named_before_its_first_change(tmp_path, source):
    log = LogOfOrders(tmp_path / "log")
    log.insert(1)
    pipeline = {"name": "shop", "source": source, "log": {"path": str(tmp_path / "log")}, "sinks": []}
    with serving(places_of(from_mapping(pipeline)), SubscriptionsConfig(port=0)) as port:
        with subscribed(port, table="shop.later"):
            pass
        status, error = refused(port, table="elsewhere.later")
        assert (status, error["kind"]) == (404, "table_unknown")
    log.close()


def test_a_log_that_does_not_exist_yet_is_read_once_it_does(tmp_path):
    with serving(places_in(tmp_path / "log"), SubscriptionsConfig(port=0)) as port:
        status, error = refused(port)
        assert (status, error["kind"]) == (503, "log_missing")
        log = LogOfOrders(tmp_path / "log")
        log.insert(1)
        with subscribed(port, from_=0) as stream:
            assert ids(stream, 1) == [1]
        log.close()


def test_a_new_log_in_place_of_a_removed_one_is_served(tmp_path):
    old = LogOfOrders(tmp_path / "log")
    old.insert(1, 2, 3)
    with serving(places_in(tmp_path / "log"), SubscriptionsConfig(port=0)) as port:
        with subscribed(port, from_=0) as stream:
            assert ids(stream, 3) == [1, 2, 3]
        wait_until(lambda: "subscriptions" not in [each.name for each in threading.enumerate()], 30, "end")
        old.close()
        shutil.rmtree(tmp_path / "log")
        new = LogOfOrders(tmp_path / "log")
        new.insert(4)
        status, error = refused(port, from_=stream.id)
        assert (status, error["kind"]) == (410, "offsets_foreign")
        with subscribed(port, from_=0) as again:
            assert ids(again, 1) == [4]
        new.close()


@pytest.mark.follows("environment_unfit")
def test_missing_packages_are_reported_with_a_hint(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "uvicorn", None)
        with pytest.raises(TailraceError) as raised, serving((), SubscriptionsConfig(port=0)):
            pass
    assert raised.value.kind is Kind.ENVIRONMENT_UNFIT
    extra = re.fullmatch(r"pip install 'tailrace\[(\w+)\]'", raised.value.hint)[1]
    # What the hint would install is what was missing.
    required = importlib.metadata.requires("tailrace")
    assert any(re.match(rf"uvicorn\b.*; extra == '{extra}'", each) for each in required)
    with serving((), SubscriptionsConfig(port=0)) as port:
        assert port


@pytest.mark.follows("environment_unfit")
def test_a_port_in_use_is_reported_before_anything_is_served(orders, port):
    with pytest.raises(TailraceError) as raised, serving((), SubscriptionsConfig(port=port)):
        pass
    assert raised.value.kind is Kind.ENVIRONMENT_UNFIT
    assert "choose another port: --port" in raised.value.hint
    assert "0: any that is free" in raised.value.hint
    with serving((), SubscriptionsConfig(port=0)) as another:
        assert another not in (0, port)


@pytest.mark.parametrize("value", [None, "", "schlüssel", "secret ", "a\tb"])
def test_a_token_that_no_header_can_carry_is_refused(orders, monkeypatch, value):
    monkeypatch.delenv("TAILRACE_TOKEN")
    if value is not None:
        monkeypatch.setenv("TAILRACE_TOKEN", value)
    with pytest.raises(TailraceError) as raised, served(orders):
        pass
    assert raised.value.kind is Kind.SECRET_MISSING
