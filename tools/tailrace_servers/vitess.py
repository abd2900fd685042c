"""An embedded Vitess cluster for the tests and the benchmarks.

etcd, vtctld and vtgate, and for each shard a MySQL server and a vttablet, which is its primary. It has its
own data directory and ports on 127.0.0.1. It ends with the process that started it, unless that is killed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tailrace.errors import Kind, TailraceError
from tailrace_servers.install import is_reachable, server_account, temporary_directory
from tailrace_servers.ports import free_port

CELL = "cell1"
_START_TIMEOUT_S = 120.0
_STEP_TIMEOUT_S = 180.0
_POLL_S = 0.05

_MYSQL_SETTINGS = """
plugin-load =
bind-address = 127.0.0.1
mysqlx = 0
innodb_buffer_pool_size = 32M
innodb_log_buffer_size = 1M
innodb_redo_log_capacity = 32M
innodb_flush_log_at_trx_commit = 2
innodb_doublewrite = 0
innodb_use_native_aio = 0
sync_binlog = 0
key_buffer_size = 1M
max_connections = 200
table_open_cache = 200
performance_schema_max_table_instances = 200
performance_schema_max_thread_instances = 200
"""

#: Options of each vttablet. A transaction that vtgate leaves open at a switch blocks writers for this long.
_TABLET_OPTIONS = ("--queryserver-config-transaction-timeout", "3s", "--vreplication_retry_delay", "1s")
_MESSAGE_BYTES = str(64 << 20)


@dataclass(frozen=True, slots=True)
class VitessInstall:
    """The paths of one release's programs, of MySQL and of etcd."""

    release: str
    bin: Path
    mysql: Path
    etcd: Path


def find_vitess() -> VitessInstall:
    """Return the programs of the release in TAILRACE_VITESS, by default 22; `make vitess` builds them.

    :raises TailraceError: `ENVIRONMENT_UNFIT` if there are none.
    """
    release = os.environ.get("TAILRACE_VITESS") or "22"
    at = Path(sys.prefix) / "share" / "tailrace" / "vitess"
    found = VitessInstall(release, at / release / "bin", at / "mysql", at / "etcd" / "etcd")
    for program in (found.bin / "vtgate", found.mysql / "bin" / "mysqld", found.etcd):
        if not os.access(program, os.X_OK):
            raise TailraceError(
                Kind.ENVIRONMENT_UNFIT,
                f"find Vitess {release}: {program} does not exist",
                "run `make vitess` in the checkout",
            )
    return found


@dataclass(slots=True)
class _Tablet:
    uid: int
    keyspace: str
    shard: str
    mysql_port: int = field(default_factory=free_port)
    port: int = field(default_factory=free_port)
    grpc_port: int = field(default_factory=free_port)

    @property
    def alias(self) -> str:
        return f"{CELL}-{self.uid:010d}"

    @property
    def directory(self) -> str:
        return f"vt_{self.uid:010d}"


class EmbeddedVitess:
    """An embedded cluster with one keyspace. Call `start`, or use it as a context manager.

    :param install: from `find_vitess`.
    :param shards: by their key ranges; `("0",)` is an unsharded keyspace.
    :param vschema: of the keyspace, from the start: `{"sharded": True, "vindexes": …, "tables": …}`.
    :param schema: DDL statements for the keyspace.

    Not thread-safe, but `kill_vtgate`, `kill_tablet` and `kill_mysql` may be called from any thread.
    """

    def __init__(
        self,
        install: VitessInstall,
        *,
        keyspace: str = "shop",
        shards: Sequence[str] = ("-80", "80-"),
        schema: Sequence[str] = (),
        vschema: Mapping[str, Any] | None = None,
    ) -> None:
        self.keyspace = keyspace
        self._account = server_account()
        self.directory = temporary_directory(self._account)
        self._install = install
        self._shards = tuple(shards)
        self._schema, self._vschema = tuple(schema), vschema
        self._tablets: dict[int, _Tablet] = {}
        self._numbers = itertools.count(100)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._mysql_pids: dict[int, int] = {}
        self._ports = {
            name: free_port()
            for name in (
                "etcd",
                "etcd_peer",
                "vtctld",
                "vtctld_grpc",
                "vtgate",
                "vtgate_grpc",
                "vtgate_mysql",
            )
        }
        self._at_exit = weakref.finalize(self, _end_if_ours, os.getpid(), self._processes, self.directory)

    @property
    def release(self) -> str:
        """The release of Vitess, such as `22`."""
        return self._install.release

    @property
    def address(self) -> str:
        """The address of vtgate for gRPC, `host:port`."""
        return f"127.0.0.1:{self._ports['vtgate_grpc']}"

    @property
    def mysql_port(self) -> int:
        """The port of vtgate for MySQL's protocol, on 127.0.0.1."""
        return self._ports["vtgate_mysql"]

    @property
    def shards(self) -> list[str]:
        """The shards with a running tablet, sorted."""
        return sorted({tablet.shard for tablet in self._tablets.values()})

    def start(self) -> Self:
        """Start all servers; wait until vtgate serves.

        :raises TailraceError: `ENVIRONMENT_UNFIT`, with its last output, if a server does not start.
        """
        self._prepare()
        self._start_control()
        self.ctl("CreateKeyspace", "--durability-policy", "none", self.keyspace)
        self.add_tablets(self._shards)
        for statement in self._schema:
            self.ctl("ApplySchema", "--sql", statement, self.keyspace)
        if self._vschema is not None:
            self.ctl("ApplyVSchema", "--vschema", json.dumps(self._vschema), self.keyspace)
        self.start_vtgate()
        return self

    def close(self) -> None:
        """Kill all processes and remove the data. Idempotent."""
        _end(self._processes, self.directory)
        self._mysql_pids.clear()
        self._at_exit.detach()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # SQL

    @contextlib.contextmanager
    def connection(self, target: str = "") -> Iterator[Any]:
        """Yield a pymysql connection to vtgate, in autocommit mode.

        :param target: such as `shop/-80` for one shard; empty: the keyspace.
        """
        import pymysql

        made = pymysql.connect(
            host="127.0.0.1",
            port=self.mysql_port,
            user="tests",
            database=target or self.keyspace,
            autocommit=True,
            connect_timeout=10,
            read_timeout=60,
        )
        try:
            yield made
        finally:
            made.close()

    def execute(self, *statements: str, target: str = "") -> list[tuple[Any, ...]]:
        """Run statements through vtgate, each in its own transaction; return the rows of the last one."""
        with self.connection(target) as connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            return list(cursor.fetchall())

    def mysql(self, shard: str, *statements: str) -> None:
        """Run statements directly on the MySQL server of a shard, as its administrator."""
        import pymysql

        socket = self.directory / self._tablet(shard).directory / "mysql.sock"
        made = pymysql.connect(unix_socket=str(socket), user="vt_dba", autocommit=True)
        try:
            with made.cursor() as cursor:
                for statement in statements:
                    cursor.execute(statement)
        finally:
            made.close()

    # Parts of the cluster

    def add_tablets(self, shards: Sequence[str]) -> None:
        """Start a MySQL server and a tablet for each of `shards`, and make the tablet its primary."""
        added = [_Tablet(next(self._numbers), self.keyspace, shard) for shard in shards]
        for tablet in added:
            self._tablets[tablet.uid] = tablet
            self._make_mysql_data(tablet)
        for tablet in added:
            self._start_mysql(tablet)
        for tablet in added:
            self._start_tablet(tablet)
        for tablet in added:
            self._wait_for_http(f"vttablet-{tablet.uid}", tablet.port, "/debug/status")
            self.ctl(
                "PlannedReparentShard", f"{tablet.keyspace}/{tablet.shard}", "--new-primary", tablet.alias
            )
        for tablet in added:
            self._wait_for_http(f"vttablet-{tablet.uid}", tablet.port, "/healthz")

    def start_vtgate(self, *options: str) -> None:
        """Start vtgate, possibly after `kill_vtgate`; wait until it serves.

        :param options: options in addition to the required ones, such as those of TLS.
        """
        ports = self._ports
        self._spawn(
            "vtgate",
            *self._program("vtgate", ports["vtgate"], ports["vtgate_grpc"], "grpc-vtgateservice"),
            *("--cell", CELL, "--cells_to_watch", CELL),
            *("--mysql_server_port", str(ports["vtgate_mysql"])),
            *("--mysql_server_bind_address", "127.0.0.1", "--mysql_auth_server_impl", "none"),
            *("--tablet_types_to_wait", "PRIMARY", "--tablet_refresh_interval", "1s"),
            *("--enable_buffer", "--buffer_size", "10000", "--vschema_ddl_authorized_users", "%"),
            *options,
        )
        self._wait_for_http("vtgate", ports["vtgate"], "/debug/status")

    def kill_vtgate(self) -> None:
        """Kill vtgate with SIGKILL."""
        _kill(self._processes.pop("vtgate"))

    def kill_tablet(self, shard: str) -> None:
        """Kill the vttablet of a shard with SIGKILL; its MySQL server keeps running."""
        _kill(self._processes.pop(f"vttablet-{self._tablet(shard).uid}"))

    def kill_mysql(self, shard: str) -> None:
        """Kill the MySQL server of a shard with SIGKILL."""
        _kill_pid(self._mysql_pids.pop(self._tablet(shard).uid))

    def start_servers(self, shard: str) -> None:
        """Start a shard's killed vttablet, MySQL server or both again; wait until the shard serves."""
        tablet = self._tablet(shard)
        name = f"vttablet-{tablet.uid}"
        if tablet.uid not in self._mysql_pids:
            self._start_mysql(tablet)
        if name not in self._processes:
            self._start_tablet(tablet)
        self._wait_for_http(name, tablet.port, "/debug/status")
        self.ctl("SetWritable", tablet.alias, "true")  # MySQL starts read-only
        self._wait_for_http(name, tablet.port, "/healthz")

    def stop_tablet(self, shard: str) -> None:
        """Stop the tablet and the MySQL server of a retired shard for good."""
        tablet = self._tablet(shard)
        _kill(self._processes.pop(f"vttablet-{tablet.uid}"))
        _kill_pid(self._mysql_pids.pop(tablet.uid))
        del self._tablets[tablet.uid]

    def ctl(self, *arguments: str) -> str:
        """Run a command of vtctldclient; return its output.

        :raises TailraceError: `ENVIRONMENT_UNFIT`, with its last output, if it failed.
        """
        server = f"127.0.0.1:{self._ports['vtctld_grpc']}"
        return self._run(str(self._install.bin / "vtctldclient"), "--server", server, *arguments)

    # Resharding

    def reshard(
        self,
        workflow: str,
        sources: Sequence[str],
        targets: Sequence[str],
        on_step: Callable[[str], None] = lambda _step: None,
    ) -> None:
        """Move the keys of `sources` to `targets`, up to the switch of all traffic, before `complete`.

        :param on_step: is called after each step with `tablets`, `copied` or `switched`.
        """
        self.add_tablets(targets)
        on_step("tablets")
        both = ("--source-shards", ",".join(sources), "--target-shards", ",".join(targets))
        self._reshard(workflow, "create", *both)
        self._wait(f"the copy of {workflow}", lambda: self._is_copied(workflow), _STEP_TIMEOUT_S)
        on_step("copied")
        self.switch(workflow)
        on_step("switched")

    def reverse(self, workflow: str) -> None:
        """Switch the traffic of a workflow back to its sources."""
        self._reshard(workflow, "reversetraffic")

    def switch(self, workflow: str) -> None:
        """Switch the traffic of a workflow to its targets; may be repeated after `reverse`."""
        self._reshard(workflow, "switchtraffic")

    def complete(self, workflow: str, sources: Sequence[str] = ()) -> None:
        """Delete the source shards of a workflow, and stop the tablets of `sources`, which are the same."""
        self._reshard(workflow, "complete")
        for shard in sources:
            self.stop_tablet(shard)

    def _reshard(self, workflow: str, *arguments: str) -> str:
        return self.ctl("Reshard", "--workflow", workflow, "--target-keyspace", self.keyspace, *arguments)

    def _is_copied(self, workflow: str) -> bool:
        shown = json.loads(self._reshard(workflow, "show", "--include-logs=false"))
        states = [
            stream["state"]
            for found in shown["workflows"]
            for shard in found["shard_streams"].values()
            for stream in shard["streams"]
        ]
        return bool(states) and all(state == "Running" for state in states)

    # Processes

    def _tablet(self, shard: str) -> _Tablet:
        return next(tablet for tablet in self._tablets.values() if tablet.shard == shard)

    def _prepare(self) -> None:
        """Create the directories, and copies of the programs if the servers' account can't read them."""
        (self.directory / "log").mkdir()
        (self.directory / "mysql.cnf").write_text(_MYSQL_SETTINGS, "ascii")
        self._own(self.directory / "log", self.directory / "mysql.cnf")
        found = self._install
        if is_reachable(found.bin.resolve(), self._account):
            return
        copy = self.directory / "programs"
        for part in (found.bin, found.mysql, found.etcd.parent):
            shutil.copytree(part.resolve(), copy / part.name, symlinks=True)
        self._own(copy, *copy.rglob("*"))
        self._install = VitessInstall(found.release, copy / "bin", copy / "mysql", copy / "etcd" / "etcd")

    def _own(self, *paths: Path) -> None:
        for path in paths:
            if self._account is not None:
                self._account.own(path)

    def _start_control(self) -> None:
        ports = self._ports
        client, peer = (f"http://127.0.0.1:{ports[name]}" for name in ("etcd", "etcd_peer"))
        self._spawn(
            "etcd",
            str(self._install.etcd),
            *("--name", "one", "--data-dir", str(self.directory / "etcd")),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"one={peer}", "--unsafe-no-fsync"),
        )
        self._wait_for_http("etcd", ports["etcd"], "/health")
        services = "grpc-vtctl,grpc-vtctld"
        self._spawn(
            "vtctld",
            *self._program("vtctld", ports["vtctld"], ports["vtctld_grpc"], services),
            *("--cell", CELL, "--tablet_refresh_interval", "1s"),
        )
        self._wait_for_http("vtctld", ports["vtctld"], "/debug/status")
        topology = f"127.0.0.1:{ports['etcd']}"
        self.ctl("AddCellInfo", "--root", f"/vitess/{CELL}", "--server-address", topology, CELL)

    def _program(self, name: str, port: int, grpc_port: int, services: str) -> list[str]:
        """Return the command of one of Vitess' servers, with their common options."""
        return [
            *(str(self._install.bin / name), *self._common()),
            *("--topo_implementation", "etcd2", "--topo_global_root", "/vitess/global"),
            *("--topo_global_server_address", f"127.0.0.1:{self._ports['etcd']}"),
            *("--port", str(port), "--grpc_port", str(grpc_port), "--service_map", services),
            *("--bind-address", "127.0.0.1", "--grpc_bind_address", "127.0.0.1"),
            *("--grpc_max_message_size", _MESSAGE_BYTES),
        ]

    def _common(self) -> list[str]:
        return ["--config-file-not-found-handling", "ignore", "--log_dir", str(self.directory / "log")]

    def _mysqlctl(self, tablet: _Tablet, command: str) -> None:
        number, port = str(tablet.uid), str(tablet.mysql_port)
        at = ("--tablet_uid", number, "--mysql_port", port)
        self._run(str(self._install.bin / "mysqlctl"), *self._common(), *at, command)

    def _make_mysql_data(self, tablet: _Tablet) -> None:
        """Create a tablet's data directory as a copy of a template, as initialising one takes seconds."""
        template = self.directory / "template"
        if not template.exists():
            first = _Tablet(1, "", "")
            self._mysqlctl(first, "init")
            made = self.directory / first.directory
            pid = int((made / "mysql.pid").read_text())
            os.kill(pid, signal.SIGTERM)
            self._wait("the end of MySQL's first server", lambda: not Path(f"/proc/{pid}").exists())
            (made / "data" / "auto.cnf").unlink()  # otherwise all servers would have the same identity
            made.rename(template)
        self._mysqlctl(tablet, "init_config")
        for part in ("data", "innodb"):
            at = self.directory / tablet.directory
            self._run("cp", "-r", "--reflink=auto", str(template / part), f"{at}/")

    def _start_mysql(self, tablet: _Tablet) -> None:
        self._mysqlctl(tablet, "start")
        pid = self.directory / tablet.directory / "mysql.pid"
        self._mysql_pids[tablet.uid] = int(pid.read_text())

    def _start_tablet(self, tablet: _Tablet) -> None:
        services = "grpc-queryservice,grpc-tabletmanager,grpc-updatestream"
        self._spawn(
            f"vttablet-{tablet.uid}",
            *self._program("vttablet", tablet.port, tablet.grpc_port, services),
            *("--tablet-path", tablet.alias, "--tablet_hostname", "127.0.0.1"),
            *("--init_keyspace", tablet.keyspace, "--init_shard", tablet.shard),
            *("--init_tablet_type", "replica", "--health_check_interval", "1s"),
            *_TABLET_OPTIONS,
        )

    def _environment(self) -> dict[str, str]:
        at = str(self.directory)
        own = {
            "VTROOT": at,
            "VTDATAROOT": at,
            "HOME": at,
            "VT_MYSQL_ROOT": str(self._install.mysql),
            "EXTRA_MY_CNF": str(self.directory / "mysql.cnf"),
            "PATH": f"{self._install.bin}:{os.environ['PATH']}",
        }
        return {**os.environ, **own}

    def _as_account(self) -> list[str]:
        # Not with Popen's `user`: that forks, which is not safe in a process that uses gRPC.
        if self._account is None:
            return []
        return ["setpriv", f"--reuid={self._account.uid}", f"--regid={self._account.gid}", "--clear-groups"]

    def _spawn(self, name: str, *command: str) -> None:
        with open(self.directory / f"{name}.out", "ab") as output:
            self._processes[name] = subprocess.Popen(
                [*self._as_account(), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment(),
                cwd=self.directory,
                start_new_session=True,  # so that a terminal's Ctrl-C does not reach the server
            )

    def _run(self, *command: str) -> str:
        # Into a file, not a pipe: the MySQL server that mysqlctl starts would keep the pipe open.
        output = self.directory / "command.out"
        with open(output, "w+b") as file:
            done = subprocess.run(
                [*self._as_account(), *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT if "mysqlctl" in command[0] else subprocess.PIPE,
                env=self._environment(),
                cwd=self.directory,
                timeout=_STEP_TIMEOUT_S,
                check=False,
            )
        said = output.read_text("utf-8", "replace")
        if done.returncode != 0:
            words = said + (done.stderr or b"").decode("utf-8", "replace")
            raise TailraceError(
                Kind.ENVIRONMENT_UNFIT,
                f"run {Path(command[0]).name} {' '.join(command[-4:])}: it ended with status "
                f"{done.returncode}: {words[-1500:]}",
                "see its output",
            )
        return said

    def _wait_for_http(self, name: str, port: int, path: str) -> None:
        def is_ready() -> bool:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as answer:
                return bool(answer.status == 200)

        self._wait(name, is_ready, process=name)

    def _wait(
        self, what: str, is_so: Callable[[], bool], timeout_s: float = _START_TIMEOUT_S, process: str = ""
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if process and self._processes[process].poll() is not None:
                break
            with contextlib.suppress(OSError):
                if is_so():
                    return
            time.sleep(_POLL_S)
        words = ""
        if process:
            output = (self.directory / f"{process}.out").read_bytes()
            words = f": {output[-1500:].decode('utf-8', 'replace')}"
        raise TailraceError(
            Kind.ENVIRONMENT_UNFIT, f"wait for {what} of Vitess: it was not ready{words}", "see its output"
        )


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _kill_pid(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _mysql_servers(directory: Path) -> Iterator[int]:
    """Yield the process ids of MySQL's servers below a directory. They are not children of this process, and
    a killed mysqlctl may not have reported the server that it started.
    """
    own = f"--defaults-file={directory}/".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(word.startswith(own) for word in (process / "cmdline").read_bytes().split(b"\0")):
                yield int(process.name)


def _end(processes: dict[str, subprocess.Popen[bytes]], directory: Path) -> None:
    for process in processes.values():
        _kill(process)
    for pid in _mysql_servers(directory):
        _kill_pid(pid)
    processes.clear()


def _end_if_ours(pid: int, processes: dict[str, subprocess.Popen[bytes]], directory: Path) -> None:
    if os.getpid() == pid:
        _end(processes, directory)
        shutil.rmtree(directory, ignore_errors=True)
