"""An embedded Kafka cluster for the tests and the benchmarks.

KRaft; each node is broker and controller, with its own data directory and ports on 127.0.0.1.
Python starts, stops and kills single nodes. The cluster ends with the process that started it,
unless that process is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
import weakref
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from tailrace.errors import Kind, TailraceError
from tailrace_servers.ports import free_port

#: Settings for tests: little memory, fast elections, short timeouts.
DEFAULT_SETTINGS: Mapping[str, str] = {
    "auto.create.topics.enable": "false",
    # A killed node can register again only when its old session has expired.
    "broker.heartbeat.interval.ms": "300",
    "broker.session.timeout.ms": "2000",
    "group.initial.rebalance.delay.ms": "0",
    "log.cleaner.dedupe.buffer.size": "16777216",
    "num.network.threads": "2",
    "num.io.threads": "4",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
    "controlled.shutdown.enable": "true",
}

#: Java's options for a fast start and a small heap on few cores; the code is not fully optimised.
QUICK_JVM = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")

#: Java's options in Kafka's own start scripts.
SERVER_JVM = (
    "-Xmx1g", "-Xms1g", "-server", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35", "-XX:+ExplicitGCInvokesConcurrent",
)  # fmt: skip

#: Java reports an archive that does not match, and starts without it.
_QUIET = ("-Xlog:disable", "-Xlog:all=error:stderr")

_FORMAT_TIMEOUT_S = 60.0
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.05


def find_jars() -> Path:
    """Return the directory of Kafka's jars, which `make` fetches.

    :raises TailraceError: `ENVIRONMENT_UNFIT` if there are none.
    """
    jars = Path(sys.prefix) / "share" / "tailrace" / "kafka"
    if not any(jars.glob("kafka_*.jar")):
        raise TailraceError(
            Kind.ENVIRONMENT_UNFIT,
            "find Kafka: its jars are not installed",
            "run `make setup` in the checkout",
        )
    return jars


def class_archive(jars: Path) -> Path:
    """Return the path of the archive that scripts/make_class_archive.py writes, for a quicker start."""
    return jars.with_name("kafka.jsa")


#: Names of the listeners with authentication: SCRAM over plain connections, and over TLS.
SASL, SASL_TLS = "SASL", "SASLTLS"


@dataclass(frozen=True, slots=True)
class Door:
    """A listener for a proxy: `outside` is its advertised port, `inside` the port where the node listens."""

    outside: int
    inside: int


@dataclass(slots=True)
class _Node:
    number: int
    directory: Path
    port: int
    controller_port: int
    guarded: Mapping[str, int]  # ports by the listener's name
    door: Door | None
    process: list[subprocess.Popen[bytes]] = field(default_factory=list)  # empty, or the running one


class EmbeddedKafka:
    """An embedded cluster. Call `start`, or use it as a context manager, which starts and closes it.

    :param jars: Kafka's jars, from `find_jars`.
    :param nodes: number of brokers; Kafka's internal topics have replicas on all of them.
    :param directory: for data and logs; it is kept. None: a temporary one, removed by `close`.
    :param settings: settings of each broker, which override `DEFAULT_SETTINGS`.
    :param keystore: a PEM file with key and certificate for 127.0.0.1. With it each node has two more
        listeners, `SASL` and `SASL_TLS`, which require SCRAM credentials, and an authorizer: clients of
        these listeners may do what ACLs allow, clients of `bootstrap` everything.
    :param jvm: Java's options for each node.
    :param proxied: whether each node has a `Door`, to which its clients are also redirected. No process
        listens on its outside port until a proxy does.

    Not thread-safe, but `kill` may be called from any thread.
    """

    def __init__(
        self,
        jars: Path,
        *,
        nodes: int = 1,
        directory: Path | None = None,
        settings: Mapping[str, str] | None = None,
        keystore: Path | None = None,
        jvm: Sequence[str] = QUICK_JVM,
        proxied: bool = False,
    ) -> None:
        self._jars = jars
        self._jvm = tuple(jvm)
        self._temporary = directory is None
        self.directory = Path(tempfile.mkdtemp(prefix="tailrace-kafka-")) if directory is None else directory
        guard = {} if keystore is None else _guard_settings(keystore)
        self._settings = {**DEFAULT_SETTINGS, **guard, **(settings or {})}
        doors = () if keystore is None else (SASL, SASL_TLS)
        # With a leading zero it never starts with "-", which Kafka's tool would parse as an option.
        self._cluster = urlsafe_b64encode(b"\0" + uuid.uuid4().bytes[1:]).decode().rstrip("=")
        self._nodes = [
            _Node(
                number,
                self.directory / f"node-{number}",
                free_port(),
                free_port(),
                {door: free_port() for door in doors},
                Door(free_port(), free_port()) if proxied else None,
            )
            for number in range(1, nodes + 1)
        ]
        self._at_exit = weakref.finalize(self, _end_if_ours, os.getpid(), [n.process for n in self._nodes])

    @property
    def bootstrap(self) -> str:
        """`bootstrap.servers` of a client."""
        return ",".join(f"127.0.0.1:{node.port}" for node in self._nodes)

    def bootstrap_at(self, door: str) -> str:
        """Return `bootstrap.servers` of a client of the listener `SASL` or `SASL_TLS`."""
        return ",".join(f"127.0.0.1:{node.guarded[door]}" for node in self._nodes)

    @property
    def doors(self) -> list[Door]:
        """The doors of the nodes, in their order; none unless `proxied`."""
        return [node.door for node in self._nodes if node.door is not None]

    def log_path(self, node: int = 1) -> Path:
        """Return the path of a node's log."""
        return self._nodes[node - 1].directory / "server.log"

    def start(self) -> Self:
        """Start every node that does not run; wait until all of them are ready.

        :raises TailraceError: `ENVIRONMENT_UNFIT`, with its last output, if a node does not start.
        """
        for node in self._nodes:
            self._launch(node)
        for node in self._nodes:
            self._wait_until_ready(node)
        return self

    def start_node(self, node: int) -> None:
        """Start one node again; wait until it is ready."""
        self._launch(self._nodes[node - 1])
        self._wait_until_ready(self._nodes[node - 1])

    def stop_node(self, node: int) -> None:
        """Stop one node cleanly; it is killed if that takes too long."""
        for process in self._nodes[node - 1].process:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._nodes[node - 1].process.clear()

    def kill(self, node: int) -> None:
        """Kill one node with SIGKILL."""
        _kill(self._nodes[node - 1].process)

    def pause(self, node: int) -> None:
        """Suspend one node, with its connections open, until `resume`."""
        for process in self._nodes[node - 1].process:
            process.send_signal(signal.SIGSTOP)

    def resume(self, node: int) -> None:
        """Resume a suspended node."""
        for process in self._nodes[node - 1].process:
            process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill all nodes, and remove the directory if it is a temporary one. Idempotent."""
        for node in self._nodes:
            _kill(node.process)
        self._at_exit.detach()
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _launch(self, node: _Node) -> None:
        if node.process and node.process[0].poll() is None:
            return
        node.process.clear()
        properties = node.directory / "server.properties"
        if not properties.exists():
            node.directory.mkdir(parents=True)
            lines = [f"{name}={value}\n" for name, value in self._properties(node).items()]
            properties.write_text("".join(lines), "utf-8")
            self._format(properties)
        with open(node.directory / "server.log", "ab") as log:
            process = subprocess.Popen(
                [*self._java(), "kafka.Kafka", properties],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=node.directory,
                start_new_session=True,  # so that a terminal's Ctrl-C does not reach the server
            )
        node.process.append(process)

    def _format(self, properties: Path) -> None:
        command = [*self._java(), "kafka.tools.StorageTool", "format", "-t", self._cluster, "-c", properties]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_FORMAT_TIMEOUT_S,
            check=False,
            cwd=properties.parent,
        )
        if done.returncode != 0:
            raise TailraceError(
                Kind.ENVIRONMENT_UNFIT,
                f"format Kafka's storage: it ended with status {done.returncode}: {done.stderr[-500:]}",
                "see its output",
            )

    def _properties(self, node: _Node) -> dict[str, str]:
        voters = ",".join(f"{n.number}@127.0.0.1:{n.controller_port}" for n in self._nodes)
        copies = str(len(self._nodes))
        doors = {"PLAINTEXT": node.port, **node.guarded}
        outside, inside = dict(doors), dict(doors)
        if node.door is not None:
            outside["PROXIED"], inside["PROXIED"] = node.door.outside, node.door.inside
        protocols = {**dict.fromkeys(("CONTROLLER", *inside), "PLAINTEXT"), **_GUARDED_PROTOCOLS}
        return {
            "process.roles": "broker,controller",
            "node.id": str(node.number),
            "controller.quorum.voters": voters,
            "listeners": _addresses({**inside, "CONTROLLER": node.controller_port}),
            "advertised.listeners": _addresses(outside),
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "listener.security.protocol.map": ",".join(f"{name}:{how}" for name, how in protocols.items()),
            "log.dirs": str(node.directory / "data"),
            "offsets.topic.replication.factor": copies,
            "transaction.state.log.replication.factor": copies,
            "transaction.state.log.min.isr": str(len(self._nodes) // 2 + 1),
            **self._settings,
        }

    def _java(self) -> list[str | Path]:
        java = Path(os.environ["JAVA_HOME"], "bin", "java") if os.environ.get("JAVA_HOME") else Path("java")
        archive = class_archive(self._jars)
        shared = (f"-XX:SharedArchiveFile={archive}", *_QUIET) if archive.exists() else ()
        # No log4j file: it writes to standard output.
        return [java, *shared, *self._jvm, "-cp", f"{self._jars}/*"]

    def _wait_until_ready(self, node: _Node) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            if not node.process or node.process[0].poll() is not None:
                break
            # A broker opens its port when it is registered and has caught up with the metadata.
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", node.port), 1):
                return
            time.sleep(_POLL_S)
        words = (node.directory / "server.log").read_bytes()[-1500:].decode("utf-8", "replace")
        raise TailraceError(
            Kind.ENVIRONMENT_UNFIT,
            f"start Kafka: node {node.number} did not start: {words}",
            "see its output",
        )


_GUARDED_PROTOCOLS = {SASL: "SASL_PLAINTEXT", SASL_TLS: "SASL_SSL"}
_MECHANISMS = ("SCRAM-SHA-256", "SCRAM-SHA-512")


def _guard_settings(keystore: Path) -> dict[str, str]:
    logins = {
        f"listener.name.{door.lower()}.{mechanism.lower()}.sasl.jaas.config": (
            "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        )
        for door in _GUARDED_PROTOCOLS
        for mechanism in _MECHANISMS
    }
    return {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        # Clients of the listener without authentication, including the nodes themselves.
        "super.users": "User:ANONYMOUS",
        "sasl.enabled.mechanisms": ",".join(_MECHANISMS),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(keystore),
        **logins,
    }


def _addresses(ports: Mapping[str, int]) -> str:
    return ",".join(f"{name}://127.0.0.1:{port}" for name, port in ports.items())


def _kill(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait()
    processes.clear()


def _end_if_ours(pid: int, nodes: list[list[subprocess.Popen[bytes]]]) -> None:
    if os.getpid() == pid:
        for processes in nodes:
            _kill(processes)
