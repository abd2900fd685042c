"""The page of examples/ shows rows as they are committed, in a real browser."""

from __future__ import annotations

import functools
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
from selenium.webdriver.common.by import By

from tests.support.browser import browser
from tests.support.postgres import Database
from tests.support.subscriptions import TOKEN, ServedPipeline
from tests.support.wait import wait_until

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        """Write nothing to standard error."""


@pytest.fixture
def site() -> Iterator[str]:
    """Serve examples/ as the page describes it; return the site."""
    handler = functools.partial(QuietHandler, directory=EXAMPLES)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(30)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_page_shows_rows_as_they_are_committed_also_after_the_server_was_killed(
    pg: Database, tmp_path: Path, site: str
) -> None:
    pg.execute("create table orders(id int primary key, what text)")
    pg.execute("insert into orders values (1, 'before')")
    shop = ServedPipeline(tmp_path, pg.dsn)
    shop.write(in_run=False)
    running, serving = shop.start("run"), shop.start("serve", "--origin", site)
    try:
        wait_until((tmp_path / "shop.log" / "identity.json").exists, 120, "the log")
        shop.wait_until_served(serving)
        with browser(tmp_path / "profile") as window:
            fragment = {
                "token": TOKEN,
                "table": "public.orders",
                "server": f"http://127.0.0.1:{shop.port}",
                "from": 0,
            }

            def shown() -> list[tuple[str, object]]:
                rows = window.find_elements(By.CSS_SELECTOR, "#changes tr")
                cells = [[cell.text for cell in row.find_elements(By.TAG_NAME, "td")] for row in rows]
                return [(change, json.loads(row)) for _, _, change, row in cells[::-1]]

            window.get(f"{site}/live_rows.html#{urlencode(fragment)}")
            expected: list[tuple[str, object]] = [("snapshot", {"id": 1, "what": "before"})]
            wait_until(lambda: shown() == expected, 60, "the row of the snapshot")
            pg.execute("insert into orders values (2, '<b>bold</b>')")
            pg.execute("delete from orders where id = 1")
            expected += [("insert", {"id": 2, "what": "<b>bold</b>"}), ("delete", {"id": 1})]
            wait_until(lambda: shown() == expected, 60, "rows as they are committed")
            serving.kill()
            serving.wait(60)
            pg.execute("insert into orders values (3, 'meanwhile')")
            serving = shop.start("serve", "--origin", site)
            expected.append(("insert", {"id": 3, "what": "meanwhile"}))
            wait_until(lambda: shown() == expected, 120, "the row that came meanwhile")
            pg.execute("insert into orders values (4, 'and on')")
            expected.append(("insert", {"id": 4, "what": "and on"}))
            wait_until(lambda: shown() == expected, 60, "the row after that")
    finally:
        for process in (running, serving):
            process.kill()
            process.wait(60)
