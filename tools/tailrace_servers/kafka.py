"""A real Kafka cluster of one's own: for the tests and the benchmarks.

KRaft, each node broker and controller; its own data directory, its own ports on 127.0.0.1; nodes
are started, stopped, killed and started again one by one from Python. It ends with the process
that made it, unless that is killed itself.
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

#: Small, quick to elect, quick to expire: what tests need.
DEFAULT_SETTINGS: Mapping[str, str] = {
    "auto.create.topics.enable": "false",
    # A node that was killed is let in again only when its old session is over.
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

#: How Java runs a node: quick to start, a small heap on few cores, and code that is never compiled well.
QUICK_JVM = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")

#: As Kafka's own start scripts run it.
SERVER_JVM = (
    "-Xmx1g", "-Xms1g", "-server", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35", "-XX:+ExplicitGCInvokesConcurrent",
)  # fmt: skip

_FORMAT_TIMEOUT_S = 60.0
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.05


def find_jars() -> Path:
    """Return the directory of Kafka's jars, which `make` fetches.

    :raises TailraceError: `ENVIRONMENT_UNFIT` if they are not here.
    """
    jars = Path(sys.prefix) / "share" / "tailrace" / "kafka"
    if not any(jars.glob("kafka_*.jar")):
        raise TailraceError(
            Kind.ENVIRONMENT_UNFIT,
            "look for Kafka: its jars are not here",
            "run `make setup` in the checkout",
        )
    return jars


#: Of the doors that ask who one is: SCRAM over plain connections, and over TLS.
SASL, SASL_TLS = "SASL", "SASLTLS"


@dataclass(frozen=True, slots=True)
class Door:
    """A second way into a node, for a proxy: clients are sent to `outside`, the node listens at `inside`."""

    outside: int
    inside: int


@dataclass(slots=True)
class _Node:
    number: int
    directory: Path
    port: int
    controller_port: int
    guarded: Mapping[str, int]  # ports by the door's name
    door: Door | None
    process: list[subprocess.Popen[bytes]] = field(default_factory=list)  # empty, or the one that runs


class EmbeddedKafka:
    """One cluster. Make it, then `start()`, or use it as a context manager, which does both.

    :param jars: of Kafka, from `find_jars`.
    :param nodes: how many brokers; topics of the broker's own are kept on all of them.
    :param directory: where data and logs live; it is kept. None: a temporary one, removed by `close`.
    :param settings: of each broker, over `DEFAULT_SETTINGS`.
    :param keystore: a PEM file with key and certificate for 127.0.0.1. With it each node has two more
        doors, `SASL` and `SASL_TLS`, that ask for SCRAM credentials, and an authorizer: who comes
        through them may do what ACLs allow; who comes by `bootstrap`, everything.
    :param jvm: options of Java for each node.
    :param proxied: whether each node has a door, so that who comes in through it is sent through
        doors only. Nothing listens at its outside until a proxy does.

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
        # With a zero in front it never begins with "-", which Kafka's own tool would take for an option.
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
        """Return `bootstrap.servers` of a client that comes in by `SASL` or `SASL_TLS`."""
        return ",".join(f"127.0.0.1:{node.guarded[door]}" for node in self._nodes)

    @property
    def doors(self) -> list[Door]:
        """The doors of the nodes, in their order; none unless `proxied`."""
        return [node.door for node in self._nodes if node.door is not None]

    def log_path(self, node: int = 1) -> Path:
        """Return where a node writes its log."""
        return self._nodes[node - 1].directory / "server.log"

    def start(self) -> Self:
        """Start every node that does not run; wait until all of them take part.

        :raises TailraceError: `ENVIRONMENT_UNFIT` if one does not come up; with its last words.
        """
        for node in self._nodes:
            self._launch(node)
        for node in self._nodes:
            self._wait_until_ready(node)
        return self

    def start_node(self, node: int) -> None:
        """Start one node again; wait until it takes part."""
        self._launch(self._nodes[node - 1])
        self._wait_until_ready(self._nodes[node - 1])

    def stop_node(self, node: int) -> None:
        """Stop one node in an orderly way; it is killed if that takes too long."""
        for process in self._nodes[node - 1].process:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._nodes[node - 1].process.clear()

    def kill(self, node: int) -> None:
        """End one node with SIGKILL."""
        _kill(self._nodes[node - 1].process)

    def pause(self, node: int) -> None:
        """Let one node stand still, its connections open, until `resume`."""
        for process in self._nodes[node - 1].process:
            process.send_signal(signal.SIGSTOP)

    def resume(self, node: int) -> None:
        """Let a paused node go on."""
        for process in self._nodes[node - 1].process:
            process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End all nodes at once; remove the directory if it is a temporary one. Idempotent."""
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
                start_new_session=True,  # a terminal's Ctrl-C is not for the server
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
                "see what it says",
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
        # No log4j file: it writes to standard output.
        return [java, *self._jvm, "-cp", f"{self._jars}/*"]

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
            f"start Kafka: node {node.number} did not come up: {words}",
            "see what it says",
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
        # Who comes by the door without a guard, the nodes themselves among them.
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
