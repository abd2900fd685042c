"""A pipeline under torture: the real command, run again and again, each run ended by a fault.

A *round* is one database, one log and one set of sinks. It consists of *lives*: each is one
`tailrace run`, during which writers work on the source and one fault strikes. At the end of the
round the writers stop, a last life runs undisturbed, and the validator judges every sink by the
sink and the source alone.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml
from typer.testing import CliRunner

from tailrace.cli.main import app
from tailrace.failpoints import NAMES
from tests.support.postgres import Database
from tests.support.proxy import Proxy
from tests.support.torture import disk, ledger, power, validator
from tests.support.torture.sinks import parse_json
from tests.support.torture.topics import SETTLE_S, Topics, identity

SINKS: dict[str, dict[str, Any]] = {
    "parquet": {"type": "parquet"},
    "jsonl": {"type": "jsonl"},
    "delta": {"type": "delta", "mode": "append"},
    "mirror": {"type": "delta", "mode": "mirror"},
}

#: The failpoints that a round can reach. Those of the embedded engine, of Kafka and of real time are in
#: `tests/engine/test_kills.py`, `tests/kafka` and `tests/realtime/test_kills.py`.
#: `sink.before_remove` is passed where a table is read again: `tests/pipeline/test_repairs.py`.
POINTS = {name for name in NAMES if not name.startswith(("engine.", "kafka.", "vitess.", "realtime."))}
POINTS -= {"sink.before_remove"}

#: A life that is not over by then hangs: a fault of the product.
LIFE_TIMEOUT_S = 180.0
ROOT = Path(__file__).resolve().parents[3]


class Life:
    """One process of the pipeline, in a process session of its own."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], output: Path) -> None:
        self._output = output
        with output.open("ab") as file:
            self._silent_size = file.tell()
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                env=environment, start_new_session=True,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    @property
    def has_spoken(self) -> bool:
        """Whether it printed anything; before that, it does not react to SIGTERM."""
        return self._output.stat().st_size > self._silent_size

    def wait(self, timeout_s: float = LIFE_TIMEOUT_S) -> int:
        """Return the exit status, negative for a signal.

        :raises AssertionError: if it is still alive after `timeout_s`; with the end of its output.
        """
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still alive after {timeout_s:g} s:\n{self.last_words()}") from None

    def kill(self) -> None:
        """SIGKILL the engine alone: its JVM and workers notice by themselves."""
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """SIGSTOP: it stops, but keeps its files, locks and connections."""
        self._process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> int:
        """SIGTERM; return the exit status."""
        self._process.terminate()
        return self.wait(60)

    def close(self) -> None:
        if not self.is_over:
            self.kill()

    def last_words(self) -> str:
        with self._output.open(encoding="utf-8", errors="replace") as file:
            return "".join(deque(file, maxlen=60))


@dataclass
class Round:
    """One pipeline, from its creation to the check at the end.

    :param launcher: a module of `torture.planted` that starts the command line in place of
        `tailrace`; None: the unchanged product, with Spark also for small ranges in every other life.
    :param settings: sections of the pipeline file that override the usual ones.
    :param proxy: stands between the pipeline and the source, to be cut.
    :param disk: a small disk for the log, to be filled.
    :param topics: where a sink `kafka` writes.
    :param pause_s: how long each writer rests between two transactions.
    """

    root: Path
    database: Database
    sinks: Sequence[str]
    seed: int
    launcher: str | None = None
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    proxy: Proxy | None = None
    disk: Path | None = None
    topics: Topics | None = None
    pause_s: float = 0.03

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self.hits_file = self.root / "hits"
        self.output = self.root / "output"
        self.durable_notes = self.root / "durable"
        self.random = random.Random(self.seed)
        self.lives: list[Life] = []
        ledger.create(self.database.dsn)
        self.workload = ledger.Workload(self.database.dsn, self.seed, pause_s=self.pause_s)

    @property
    def file(self) -> Path:
        return self.root / "pipeline.yaml"

    @property
    def pipeline(self) -> str:
        """The pipeline's name."""
        return self.database.name.replace("_", "-")

    @property
    def log(self) -> Path:
        return (self.disk or self.root) / "log"

    def write_file(self, sinks: Sequence[str] | None = None) -> None:
        """Write the pipeline's YAML file.

        :param sinks: which of the round's sinks to feed in the next lives; None: all of them.
            Without any, Spark does not start, and a life takes a second or two.
        """
        wanted = self.sinks if sinks is None else sinks
        sections: dict[str, Any] = {
            "name": self.pipeline,
            "source": {
                "type": "postgresql", "host": "127.0.0.1", "user": "postgres",
                "port": self.proxy.port if self.proxy else self.database.port,
                "dbname": self.database.name, "status_interval_s": 1,
                "reconnect_delay_s": 0.1, "reconnect_delay_s_max": 1,
            },
            "log": {"path": str(self.log), "segment_bytes": 64 * 1024},
            "sinks": [
                self._section(kind) | {"name": kind}
                for kind in wanted
            ],
            "spark": {"master": "local[2]", "conf": {"spark.ui.enabled": "false"}},
        }  # fmt: skip
        for section, values in self.settings.items():
            sections[section] |= values
        self.file.write_text(yaml.safe_dump(sections, sort_keys=False))

    def _section(self, kind: str) -> dict[str, Any]:
        if kind == "kafka":
            assert self.topics is not None
            return self.topics.section()
        usual = {"path": str(self.root / kind), "batch_rows_max": 20_000, "retry_attempts_max": 2}
        return SINKS[kind] | usual

    def live(
        self,
        failpoints: str = "",
        *,
        until_caught_up: bool = True,
        output: Path | None = None,
        **environment: str,
    ) -> Life:
        """Start one life of the pipeline, with `failpoints` armed.

        :param output: a separate file for its output; None: that of the round.
        """
        # In every other life Spark writes small ranges, too: each way continues what the other one left.
        launcher = self.launcher or ("spark_alone" if len(self.lives) % 2 else None)
        module = "tailrace" if launcher is None else f"tests.support.torture.planted.{launcher}"
        command = [sys.executable, "-m", module, "run", str(self.file)]
        command += ["--until-caught-up"] if until_caught_up else []
        life = Life(
            command,
            {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                "PYTHONUNBUFFERED": "1",
                "TAILRACE_FAILPOINTS": failpoints,
                "TAILRACE_FAILPOINTS_LOG": str(self.hits_file),
                power.VARIABLE: str(self.durable_notes),
                **environment,
            },
            output or self.output,
        )
        self.lives.append(life)
        return life

    def hits(self) -> Counter[str]:
        """Return how often each failpoint was reached, over all lives so far."""
        return Counter(self.hits_file.read_text().split()) if self.hits_file.exists() else Counter()

    def undergo(self, fault: Fault) -> bool:
        """Run one life that ends in `fault`, with writers at work; return whether the fault took effect."""
        with self.at_work(fault.transactions):
            return fault.strike(self)

    @contextlib.contextmanager
    def at_work(self, transactions: int | None = 120) -> Iterator[ledger.Workload]:
        """Let the writers work on the source while the context is open, up to a limit."""
        self.workload.start(transactions)
        try:
            yield self.workload
        finally:
            self.workload.stop()

    def judge(self) -> list[str]:
        """Run a last, undisturbed life and return the problems of each sink.

        :raises AssertionError: if the pipeline can't get to the end.
        """
        self.write_file()
        life = self.live()
        status = life.wait()
        if status != 0:
            raise AssertionError(f"the undisturbed life ended with status {status}:\n{life.last_words()}")
        return [f"{kind}: {problem}" for kind in self.sinks for problem in self._problems(kind)]

    def _problems(self, kind: str) -> list[str]:
        if kind == "kafka":
            assert self.topics is not None
            return self.topics.problems(self.database.dsn)
        return validator.problems(kind, self.root / kind, self.database.dsn)

    def disagreements(self, settle_s: float = SETTLE_S) -> list[str]:
        """Return the differences between a Kafka sink's records and its offset, while there are no writes.

        Other sinks have none: they commit a range together with its record, which `judge` checks.
        """
        if self.topics is None:
            return []
        shown = self.command("log", "show", str(self.log), "--json")
        if "log_missing" in shown.stderr:
            return self.topics.disagreements({}, settle_s)
        assert shown.returncode == 0, shown.stderr
        changes = [parse_json(line, "log") for line in shown.stdout.split("\n")[:-1]]
        return self.topics.disagreements(
            {identity(change): change.log_offset for change in changes}, settle_s
        )

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `tailrace` with `words`, to its end."""
        return subprocess.run(
            [sys.executable, "-m", "tailrace", *words],
            capture_output=True, text=True, check=False, timeout=LIFE_TIMEOUT_S,
        )  # fmt: skip

    def judge_log(self) -> list[str]:
        """Return the problems of the log itself, as `tailrace log` shows and verifies it."""
        found = []
        # In this process: other interpreters would show nothing more.
        if (verified := CliRunner().invoke(app, ["log", "verify", str(self.log)])).exit_code != 0:
            found.append(f"log verify: {verified.output}")
        shown = CliRunner().invoke(app, ["log", "show", str(self.log), "--json"])
        if shown.exit_code != 0:
            found.append(f"log show: {shown.stderr}")
        changes = [parse_json(line, "log") for line in shown.stdout.split("\n")[:-1]]
        return found + validator.history_problems(changes, ledger.source_rows(self.database.dsn))

    def finish(self, life: Life) -> None:
        """End a life that survived its fault by SIGTERM: a normal end must not lose anything either."""
        if self.random.random() < 0.5 or not life.has_spoken:
            life.kill()
            return
        status = life.end()
        assert status == 0, f"ended with status {status} after SIGTERM:\n{life.last_words()}"

    def close(self) -> None:
        """End every process of this round, also those of Spark, which outlive a killed engine."""
        for life in self.lives:
            life.close()
        left = [process for process in psutil.process_iter() if self._is_ours(process)]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, 10)

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("TAILRACE_FAILPOINTS_LOG") == str(self.hits_file)
        except psutil.Error:
            return False


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that ends a life, or tries to. `strike` starts the life and waits for its end.

    It returns whether the fault took place as planned. A failpoint that is not reached, for example,
    lets the life end normally.
    """

    name: str
    strike: Callable[[Round], bool]
    transactions: int | None = 120  # transactions of the writers meanwhile; None: as many as possible


def kill_at(failpoint: str, count: int = 1, *, until_caught_up: bool = True) -> Fault:
    """SIGKILL the process that reaches `failpoint` for the `count`-th time.

    In a Spark worker that kills the worker; the engine must cope or stop.

    :param until_caught_up: let the life end if it catches up; False: the writers work until it
        reaches the failpoint.
    """

    def strike(round_: Round) -> bool:
        before = round_.hits()[failpoint]
        life = round_.live(f"{failpoint}=kill@{count}", until_caught_up=until_caught_up)
        status = life.wait()
        reached = round_.hits()[failpoint] - before >= count
        assert status in ((-signal.SIGKILL, 1, 0) if reached else (0,)), (
            f"{failpoint}@{count}: ended with status {status}:\n{life.last_words()}"
        )
        return reached

    return Fault(f"kill at {failpoint}@{count}", strike, 120 if until_caught_up else None)


def kill_at_random(latest_s: float) -> Fault:
    """SIGKILL the engine at a random moment of its first `latest_s` seconds."""

    def strike(round_: Round) -> bool:
        life = round_.live(until_caught_up=False)
        deadline = time.monotonic() + round_.random.uniform(0.2, latest_s)
        while time.monotonic() < deadline and not life.is_over:
            time.sleep(0.01)
        assert not life.is_over, f"ended by itself:\n{life.last_words()}"
        life.kill()
        return True

    return Fault("kill -9 at a random moment", strike)


def kill_source(latest_s: float) -> Fault:
    """SIGKILL every process of the source while the pipeline runs, and start it again."""

    def strike(round_: Round) -> bool:
        life = round_.live(until_caught_up=False)
        for _ in range(2):
            time.sleep(round_.random.uniform(0.5, latest_s / 2))
            round_.database.server.kill()
            round_.database.server.start()
        assert not life.is_over, f"did not survive its source's restart:\n{life.last_words()}"
        round_.finish(life)
        return True

    return Fault("kill -9 of the source", strike)


def cut_connection(latest_s: float) -> Fault:
    """Cut the connection again and again, each time after a random number of bytes."""

    def strike(round_: Round) -> bool:
        assert round_.proxy is not None
        life = round_.live(until_caught_up=False)
        deadline = time.monotonic() + latest_s
        while time.monotonic() < deadline:
            round_.proxy.cut_after(int(round_.random.expovariate(1 / 20_000)) + 1, "to_client")
            time.sleep(round_.random.uniform(0.05, 0.5))
        assert not life.is_over, f"did not survive cut connections:\n{life.last_words()}"
        round_.finish(life)
        return True

    return Fault("connection cut at random bytes", strike)


def fill_disk(latest_s: float) -> Fault:
    """Fill the log's disk while the pipeline runs, and make room again."""

    def strike(round_: Round) -> bool:
        assert round_.disk is not None
        life = round_.live(until_caught_up=False)
        for _ in range(2):
            time.sleep(round_.random.uniform(0.5, latest_s / 2))
            ballast = disk.fill(round_.disk)
            time.sleep(round_.random.uniform(0.2, 2))
            ballast.unlink()
        assert not life.is_over, f"did not survive a full disk:\n{life.last_words()}"
        round_.finish(life)
        return True

    return Fault("disk full", strike)


def lose_power(latest_s: float) -> Fault:
    """SIGKILL; everything that was not fsynced is lost. Needs a launcher that records fsyncs."""

    def strike(round_: Round) -> bool:
        life = round_.live(until_caught_up=False)
        time.sleep(round_.random.uniform(latest_s / 2, latest_s))
        assert not life.is_over, f"ended by itself:\n{life.last_words()}"
        life.kill()
        power.lose(round_.log, round_.durable_notes, round_.random)
        return True

    # Work goes on until the kill, so that there is always something that is not durable yet.
    return Fault("power lost", strike, transactions=None)
