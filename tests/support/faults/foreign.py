"""PostgreSQL as a user runs it: started by its own tools, used through an ordinary role.

Nothing of `tailrace_servers` starts it or knows it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from tailrace_servers.ports import free_port

ADMIN = "boss"
ADMIN_PASSWORD = "b@ss:word/1"
ROLE = "cdc"
ROLE_PASSWORD = "p@ss:word/%2"


@dataclass(frozen=True, slots=True)
class ForeignServer:
    """A server with passwords; `dsn` is its owner's."""

    version: int
    port: int

    @property
    def dsn(self) -> str:
        return psycopg.conninfo.make_conninfo(
            host="127.0.0.1", port=self.port, user=ADMIN, password=ADMIN_PASSWORD, dbname="postgres"
        )

    def execute(self, statement: str) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(statement.encode())


@contextlib.contextmanager
def foreign_server(version: int, binaries: Path, directory: Path, account: Any) -> Iterator[ForeignServer]:
    """Run a server with `initdb` and `pg_ctl`, as an administrator would.

    :param account: uid and gid to run under; None: this process's own.
    """
    directory.mkdir()
    password_file = directory / "password"
    password_file.write_text(ADMIN_PASSWORD)
    port = free_port()
    identity: dict[str, Any] = {}
    if account is not None:
        for path in (directory, password_file):
            os.chown(path, account.uid, account.gid)
        identity = {"user": account.uid, "group": account.gid, "extra_groups": []}
    data, log = directory / "data", directory / "log"

    def tool(name: str, *arguments: str) -> None:
        subprocess.run(
            [binaries / name, "-D", data, *arguments],
            check=True, timeout=60, cwd=directory, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C"}, **identity,
        )  # fmt: skip

    tool(
        "initdb", "-U", ADMIN, f"--pwfile={password_file}", "--auth=scram-sha-256", "-E", "UTF8", "--no-sync"
    )
    settings = ("wal_level=logical", "fsync=off", "unix_socket_directories=''", "listen_addresses=127.0.0.1")
    options = f"-p {port} " + " ".join(f"-c {setting}" for setting in settings)
    tool("pg_ctl", "start", "-w", "-l", str(log), "-o", options)
    try:
        yield ForeignServer(version, port)
    finally:
        tool("pg_ctl", "stop", "-m", "immediate")
        shutil.rmtree(directory, ignore_errors=True)
