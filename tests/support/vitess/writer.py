"""Who writes to a keyspace while it is resharded and broken."""

from __future__ import annotations

import threading
from typing import Self

import pymysql

from tailrace_servers.vitess import EmbeddedVitess
from tests.support.wait import wait_until

KEYS = 40
STEP_S = 180.0


class Writer:
    """Inserts keys, and raises their counters one after another, until it is stopped.

    A write that fails while traffic is being switched is not tried again.
    """

    def __init__(self, cluster: EmbeddedVitess, table: str) -> None:
        self._cluster = cluster
        self._table = table
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.rounds = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(60)

    def more(self) -> None:
        """Wait until every key was written once more."""
        rounds = self.rounds
        wait_until(lambda: self.rounds > rounds + 1, STEP_S, "another round of writes")

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with self._cluster.connection() as connection, connection.cursor() as cursor:
                    connection.autocommit(True)
                    while not self._stopping.wait(0.02):
                        for key in range(KEYS):
                            cursor.execute(
                                f"insert into {self._table} (id) values ({key}) "
                                "on duplicate key update counter = counter + 1"
                            )
                        self.rounds += 1
            except (pymysql.MySQLError, OSError):
                self._stopping.wait(0.2)
