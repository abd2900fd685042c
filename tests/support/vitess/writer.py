"""A writer to a keyspace that is resharded and broken meanwhile."""

from __future__ import annotations

import threading
from typing import Self

import pymysql

from tailrace_servers.vitess import EmbeddedVitess
from tests.support.wait import wait_until

KEYS = 40
STEP_S = 180.0


class Writer:
    """Some connections, each of which inserts its keys and raises their counters one after another, until it
    is stopped.

    A write that fails while traffic is being switched is not repeated.
    """

    def __init__(self, cluster: EmbeddedVitess, table: str, connections: int = 1) -> None:
        self._cluster = cluster
        self._table = table
        self._stopping = threading.Event()
        self._rounds = [0] * connections
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(connections)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)

    def more(self) -> None:
        """Wait until every key was written once more."""
        before = list(self._rounds)

        def is_done() -> bool:
            return all(now > then + 1 for then, now in zip(before, self._rounds, strict=True))

        wait_until(is_done, STEP_S, "another round of writes")

    def _run(self, number: int) -> None:
        while not self._stopping.is_set():
            try:
                with self._cluster.connection() as connection, connection.cursor() as cursor:
                    connection.autocommit(True)
                    while not self._stopping.wait(0.02):
                        for key in range(number, KEYS, len(self._rounds)):
                            cursor.execute(
                                f"insert into {self._table} (id) values ({key}) "
                                "on duplicate key update counter = counter + 1"
                            )
                        self._rounds[number] += 1
            except (pymysql.MySQLError, OSError):
                self._stopping.wait(0.2)
