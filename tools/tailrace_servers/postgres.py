"""An embedded PostgreSQL server for the demo, the benchmarks and the tests.

It has its own data directory and port on 127.0.0.1, and `wal_level = logical`; Python starts,
stops and kills it. It ends with the process that started it, unless that process is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import psutil
import psycopg

from tailrace.errors import Kind, TailraceError
from tailrace_servers.install import (
    Install,
    ServerAccount,
    is_reachable,
    server_account,
    temporary_directory,
    within_reach,
)
from tailrace_servers.ports import free_port

SUPERUSER = "postgres"

DEFAULT_SETTINGS: Mapping[str, str] = {
    "wal_level": "logical",
    "max_wal_senders": "20",
    "max_replication_slots": "20",
    "max_connections": "100",
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",  # socket paths have a length limit that directories here break
    # In files of the data directory: a killed server leaves other kinds of shared memory behind, up to 1 MB.
    # (With any setting there is one small segment of System V: `close` removes it.)
    "dynamic_shared_memory_type": "mmap",
    "timezone": "UTC",
    "log_line_prefix": "%m [%p] ",
}

_START_TIMEOUT_S = 60.0  # includes crash recovery after a kill
_END_TIMEOUT_S = 10.0
_POLL_S = 0.02

_SEGMENT_LINE = 6  # in postmaster.pid, counted from 0: the segment's key and id
_IPC_RMID = 0  # of <sys/ipc.h>, on Linux as on macOS


class EmbeddedPostgres:
    """An embedded server. Call `start`, or use it as a context manager, which starts and closes it.

    :param install: the binaries, from `find_install`.
    :param directory: for data and log; it is kept. None: a temporary directory, which `close`
        removes.
    :param settings: server settings that override `DEFAULT_SETTINGS`; `ALTER SYSTEM` overrides them.
    :param password: the superuser's. None: connections need no password, so use it only for tests
        and throw-away data.
    :param durable: False disables fsync: a killed server still loses nothing, but a power failure
        loses data.
    :param in_memory: whether a temporary directory may be in a memory file system.

    Not thread-safe, but `kill` may be called from any thread.
    """

    def __init__(
        self,
        install: Install,
        directory: Path | None = None,
        *,
        settings: Mapping[str, str] | None = None,
        password: str | None = None,
        durable: bool = True,
        in_memory: bool = False,
    ) -> None:
        self.account: ServerAccount | None = server_account()
        self._temporary = directory is None
        if directory is None:
            directory = temporary_directory(self.account, in_memory=in_memory)
        self.directory = directory.resolve()
        self.version = install.version
        self.password = password
        self.port = free_port()
        self.settings = {**DEFAULT_SETTINGS, **({} if durable else {"fsync": "off"}), **(settings or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._given_install = install
        self._install: Install | None = None
        # Ends the server at the interpreter's exit if it was not closed.
        self._postmaster: list[psutil.Process] = []  # empty, or the running one
        self._at_exit = weakref.finalize(self, _end_if_ours, os.getpid(), self._postmaster, self._pid_file)

    # ------------------------------------------------------------------ start and stop

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def _pid_file(self) -> Path:
        return self.data / "postmaster.pid"

    @property
    def log_path(self) -> Path:
        return self.directory / "server.log"

    @property
    def bin(self) -> Path:
        """Directory of the binaries in use: `pg_recvlogical`, `pgbench` and the others."""
        if self._install is None:
            self._prepare_directory()
            self._install = within_reach(self._given_install, self.account, self.directory)
        return self._install.bin

    @property
    def pid(self) -> int | None:
        """Process id of the postmaster while it runs."""
        if self._process is None or self._process.poll() is not None:
            return None
        return self._process.pid

    def start(self) -> Self:
        """Start the server, after creating its data directory if there is none; wait until it
        accepts connections. Does nothing if it runs.

        :raises TailraceError: `ENVIRONMENT_UNFIT`, with its last output, if it does not start.
        """
        if self.pid is not None:
            return self
        if not (self.data / "PG_VERSION").exists():
            self._make_data_directory()
        self.write_settings()
        with open(self.log_path, "ab") as log:
            self._process = subprocess.Popen(
                [self.bin / "postgres", "-D", self.data],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env=_environment(),
                start_new_session=True,  # so that a terminal's Ctrl-C does not reach the server
                **self._as_account(),
            )
        self._postmaster[:] = [psutil.Process(self._process.pid)]
        self._wait_until_ready()
        return self

    def stop(self, mode: Literal["fast", "immediate"] = "fast", *, timeout_s: float = 30.0) -> None:
        """Stop the server cleanly (`fast`), or without a shutdown, as in a crash (`immediate`).

        A fast stop waits until replication clients have received the rest of the WAL.

        :raises TimeoutError: if it did not end in time; it was then killed.
        """
        if self._process is None or self.pid is None:
            return
        children = _children(self._postmaster)
        self._process.send_signal(signal.SIGINT if mode == "fast" else signal.SIGQUIT)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TimeoutError(f"PostgreSQL {self.version} did not stop within {timeout_s:g} s") from None
        _wait_until_gone(children)
        self._postmaster.clear()

    def kill(self) -> None:
        """Kill every process of the server with SIGKILL; returns when all have ended."""
        if self._process is None:
            return
        children = _children(self._postmaster)
        self._process.kill()  # first, so that it starts no new children
        self._process.wait(_END_TIMEOUT_S)
        _kill(children)
        self._postmaster.clear()

    def restart(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop the server if it runs, and start it again on the same port."""
        self.stop(mode)
        self.start()

    def reload(self) -> None:
        """Write the settings and make the running server read them again."""
        self.write_settings()
        if self._process is not None and self.pid is not None:
            self._process.send_signal(signal.SIGHUP)

    def close(self) -> None:
        """Kill the server, and remove its directory if it is a temporary one. Idempotent."""
        self.kill()
        if self._process is not None:
            _remove_shared_memory(self._pid_file, self._process.pid)
        self._at_exit.detach()
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ use

    def dsn(self, dbname: str = "postgres", *, user: str = SUPERUSER) -> str:
        """Return a connection string, without the password."""
        return f"postgresql://{user}@127.0.0.1:{self.port}/{dbname}"

    def connect(self, dbname: str = "postgres", **options: Any) -> psycopg.Connection[Any]:
        """Return a connection as the superuser, in autocommit mode by default."""
        options.setdefault("autocommit", True)
        if self.password is not None:
            options.setdefault("password", self.password)
        return psycopg.connect(self.dsn(), dbname=dbname, connect_timeout=10, **options)

    def execute(
        self, statement: str, parameters: Sequence[Any] | None = None, *, dbname: str = "postgres"
    ) -> None:
        """Run a statement (several, if there are no parameters) in a separate connection."""
        with self.connect(dbname) as connection:
            connection.execute(statement.encode(), parameters)

    def query(
        self, statement: str, parameters: Sequence[Any] | None = None, *, dbname: str = "postgres"
    ) -> list[tuple[Any, ...]]:
        """Return the rows of a query, run in a separate connection."""
        with self.connect(dbname) as connection:
            return connection.execute(statement.encode(), parameters).fetchall()

    def create_database(self, name: str) -> str:
        """Create a database and return its connection string."""
        self.execute(f'create database "{name}"')
        return self.dsn(name)

    def own(self, path: Path) -> None:
        """Make the server's account the owner of a file, such as a certificate."""
        if self.account is not None:
            self.account.own(path)

    # ------------------------------------------------------------------ inside

    def write_settings(self) -> None:
        """Write `settings` to the server's configuration; they apply from the next start or reload."""
        path = self.data / "tailrace.conf"
        lines = [
            f"{name} = {_quoted(value)}" for name, value in {**self.settings, "port": str(self.port)}.items()
        ]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        self.own(path)

    def _prepare_directory(self) -> None:
        if not self.directory.exists():
            self.directory.mkdir(parents=True, mode=0o700)
            self.own(self.directory)
        if not is_reachable(self.directory, self.account):
            raise TailraceError(
                Kind.ENVIRONMENT_UNFIT,
                "prepare PostgreSQL's directory: the account under which it runs can't enter it",
                "choose a directory that every user may enter, or do not run this as root",
                {"directory": str(self.directory), "account": self.account.name if self.account else ""},
            )

    def _make_data_directory(self) -> None:
        # Under another name until it is complete: a run that is killed here leaves no incomplete directory.
        unfinished = self.directory / "data.new"
        command: list[str | Path] = [
            self.bin / "initdb", "-D", unfinished, "-U", SUPERUSER,
            "--encoding=UTF8", "--locale=C", "--no-instructions",
        ]  # fmt: skip
        if self.settings.get("fsync") == "off":
            command.append("--no-sync")
        shutil.rmtree(unfinished, ignore_errors=True)
        password_file = self.directory / "password"
        if self.password is None:
            command.append("--auth=trust")
        else:
            password_file.touch(0o600)
            password_file.write_text(self.password + "\n", encoding="utf-8")
            self.own(password_file)
            command += ["--auth=scram-sha-256", f"--pwfile={password_file}"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
                cwd=self.directory, env=_environment(), timeout=_START_TIMEOUT_S, **self._as_account(),
            )  # fmt: skip
        finally:
            password_file.unlink(missing_ok=True)
        if done.returncode != 0:
            self._fail("initdb", done.returncode, done.stderr)
        with open(unfinished / "postgresql.conf", "a", encoding="utf-8") as configuration:
            configuration.write("\ninclude 'tailrace.conf'\n")
        unfinished.rename(self.data)

    def _wait_until_ready(self) -> None:
        # The postmaster writes its state into the eighth line of its pid file. Attempts to connect would
        # write lines to its log.
        assert self._process is not None
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            if (status := self._process.poll()) is not None:
                self._fail("postgres", status, self.log_path.read_text("utf-8", "replace"))
            try:
                lines = self._pid_file.read_text().split("\n")
            except FileNotFoundError:
                lines = []
            if len(lines) >= 8 and lines[0] == str(self._process.pid) and lines[7].strip() == "ready":
                return
            time.sleep(_POLL_S)
        self.kill()
        raise TailraceError(
            Kind.ENVIRONMENT_UNFIT,
            f"start PostgreSQL {self.version}: not ready within {_START_TIMEOUT_S:g} s",
            f"see {self.log_path}",
        )

    def _fail(self, program: str, status: int, output: str) -> None:
        last = next((line for line in reversed(output.splitlines()) if line.strip()), "no output")
        raise TailraceError(
            Kind.ENVIRONMENT_UNFIT,
            f"start PostgreSQL {self.version}: {program} ended with status {status}: {last.strip()}",
            f"see {self.log_path}" if self.log_path.exists() else "",
        )

    def _as_account(self) -> dict[str, Any]:
        if self.account is None:
            return {"umask": 0o077}
        return {
            "user": self.account.uid,
            "group": self.account.gid,
            "extra_groups": [],
            "umask": 0o077,
        }


def _environment() -> dict[str, str]:
    # The caller's PG* variables are for clients; PGDATA and PGPORT would change the server's settings.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_"))}
    return {**kept, "LC_ALL": "C"}


def _quoted(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _children(postmaster: list[psutil.Process]) -> list[psutil.Process]:
    try:
        return [child for process in postmaster for child in process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _wait_until_gone(processes)


def _wait_until_gone(processes: list[psutil.Process]) -> None:
    # A zombie has ended: it has no memory, lock or port. Orphans may stay zombies for seconds if
    # process 1 is slow to reap them.
    deadline = time.monotonic() + _END_TIMEOUT_S
    while time.monotonic() < deadline and not all(map(_is_gone, processes)):
        time.sleep(_POLL_S)


def _is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _remove_shared_memory(pid_file: Path, postmaster: int) -> None:
    """Remove the System V segment of a server that was killed.

    A server that starts again on the same data directory removes it itself. Otherwise it would stay, and a
    machine has at most 4096 segments: https://www.postgresql.org/docs/current/kernel-resources.html
    """
    try:
        lines = pid_file.read_text().split("\n")
    except FileNotFoundError:  # it has stopped cleanly, and removed both
        return
    key_and_id = lines[_SEGMENT_LINE].split() if len(lines) > _SEGMENT_LINE else []
    if lines[0] == str(postmaster) and len(key_and_id) == 2:
        ctypes.CDLL(None).shmctl(int(key_and_id[1]), _IPC_RMID, None)


def _end_if_ours(maker: int, postmaster: list[psutil.Process], pid_file: Path) -> None:
    if os.getpid() == maker:  # not in a forked child
        _kill([*postmaster, *_children(postmaster)])
        for process in postmaster:
            _remove_shared_memory(pid_file, process.pid)
