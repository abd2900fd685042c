"""Finds Java, starts Spark's Java process, and distinguishes local masters from clusters.

PySpark would start the process with every setting on its command line, which any user of the
machine can read. Here the command line has only settings that Java needs at its start; all others,
which may include credentials of a lake, are passed afterwards.

The process gets its own operating system session, so that Ctrl-C at the terminal reaches only the
pipeline, which then ends its Spark jobs in order. It ends by itself when its parent has ended.
"""

from __future__ import annotations

import collections
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailrace.errors import Kind, TailraceError

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The oldest release that Spark 4 runs on.
JAVA_VERSION_MIN = 17

#: Prefixes of settings that Java needs at its start.
_ON_COMMAND_LINE = ("spark.driver.", "spark.jars", "spark.submit.")

#: The garbage collector. Measured on two cores, replaying 2 million rows: 1.4 s of Java's CPU, with G1 1.8 s.
_COLLECTOR = "-XX:+UseParallelGC"
_LINES_KEPT = 30

_ANSWER_TIMEOUT_S = 30
_IN_PROCESS = re.compile(r"local(?:\[(?P<cores>\*|\d+)(?:,\s*\d+)?\])?")
_INSTALL = (
    f"install Java {JAVA_VERSION_MIN} or later (Debian and Ubuntu: `apt install openjdk-17-jre-headless`, "
    "macOS: `brew install openjdk@17`) and put it on PATH, or set JAVA_HOME to its folder"
)


def cores_of(master: str) -> int | None:
    """Return the number of tasks that a master runs at once in this process; None for a cluster.

    `local-cluster[…]` is a cluster: its executors are separate processes.
    """
    found = _IN_PROCESS.fullmatch(master.strip())
    if found is None:
        return None
    if found["cores"] == "*":
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(found["cores"] or 1)


def require_java() -> int:
    """Return the major version of the Java that Spark starts: that of JAVA_HOME, or else of PATH.

    :raises TailraceError: `ENVIRONMENT_UNFIT` if there is no Java, it does not run, or it is too old.
    """
    home = os.environ.get("JAVA_HOME", "")
    command = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if command is None:
        raise _unfit("find Java: there is none on PATH, and JAVA_HOME is not set")
    try:
        answer = subprocess.run(
            [command, "-version"], capture_output=True, timeout=_ANSWER_TIMEOUT_S, check=True
        ).stderr.decode(errors="replace")
    except (OSError, subprocess.SubprocessError) as error:
        where = "that JAVA_HOME names" if home else "on PATH"
        raise _unfit(f"start the Java {where}, {command!r}: {type(error).__name__}") from error
    version = major_version(answer)
    if version is None:
        raise _unfit(f"read the version of {command!r}: it prints none")
    if version < JAVA_VERSION_MIN:
        raise _unfit(f"find Java: {command!r} is version {version}, Spark needs {JAVA_VERSION_MIN}")
    return version


def require_same_spark() -> None:
    """Check that the Spark that PySpark starts, that of SPARK_HOME if it is set, is of its own release line.

    :raises TailraceError: `ENVIRONMENT_UNFIT`.
    """
    from importlib.metadata import version

    home, line = os.environ.get("SPARK_HOME"), ".".join(version("pyspark").split(".")[:2])
    if home is not None and not any(Path(home, "jars").glob(f"spark-core_*-{line}.*.jar")):
        raise TailraceError(
            Kind.ENVIRONMENT_UNFIT,
            f"start Spark: SPARK_HOME is {home!r}, which has no Spark {line}",
            f"unset SPARK_HOME: PySpark has a Spark of its own; or let it name a Spark {line}",
        )


def major_version(answer: str) -> int | None:
    """Return the major version that `java -version` reports; 8 for "1.8.0_402"."""
    found = re.search(r'version "(?:1\.)?(\d+)', answer)
    return int(found[1]) if found else None


def _unfit(message: str) -> TailraceError:
    return TailraceError(Kind.ENVIRONMENT_UNFIT, message, _INSTALL)


def launch_jvm(settings: Mapping[str, str]) -> Any:
    """Start Java with Spark's classes and return the py4j gateway to it.

    :raises TailraceError: `SPARK_FAILED`, with Java's output, if it ends before it accepts a connection;
        `ENVIRONMENT_UNFIT` as `require_same_spark`.
    """
    require_same_spark()
    from pyspark import SparkConf
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway

    conf = SparkConf(loadDefaults=False)
    for name, value in settings.items():
        if name.startswith(_ON_COMMAND_LINE):
            conf.set(name, value)
    conf.set("spark.driver.extraJavaOptions", java_options(settings))
    relay = _Relay()
    try:
        gateway = launch_gateway(  # type: ignore[no-untyped-call]
            conf, {"stdout": relay.write_end, "stderr": relay.write_end, "start_new_session": True}
        )
    except PySparkRuntimeError as error:
        raise TailraceError(
            Kind.SPARK_FAILED,
            f"start Spark's Java process: it ended at once with the output: {relay.last_words()}",
            "correct the setting that it names, in spark.conf or in the variable SPARK_SUBMIT_OPTS. If it "
            "could not fetch packages, put Delta's jars into the directory that TAILRACE_JARS names",
        ) from error
    finally:
        relay.close_write_end()
    relay.forward()
    return gateway


def java_options(settings: Mapping[str, str]) -> str:
    """Return the options of Java itself: the defaults, then the user's, which take precedence."""
    log4j = Path(__file__).with_name("log4j2.properties").as_uri()
    own = ["-Duser.timezone=UTC", f"-Dlog4j2.configurationFile={log4j}"]
    user = settings.get("spark.driver.extraJavaOptions", "")
    if not re.search(r"-XX:\+Use\w+GC\b", user):  # Java refuses two collectors
        own.append(_COLLECTOR)
    return " ".join([*own, user]).strip()


class _Relay:
    """Java's output: withheld until it has started, then forwarded to standard error.

    While starting, Java and Spark's launcher print many lines, which are of use only if the start
    fails. Java never writes to standard output, where this process may print JSON.
    A thread reads continuously, so that a full pipe never blocks Java.
    """

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        self._kept: collections.deque[bytes] = collections.deque(maxlen=_LINES_KEPT)
        self._forwarding = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spark-stderr", daemon=True)
        self._thread.start()

    def close_write_end(self) -> None:
        os.close(self.write_end)

    def forward(self) -> None:
        self._forwarding.set()

    def last_words(self) -> str:
        self._thread.join(timeout=1)
        words = [line.decode(errors="replace").strip() for line in self._kept]
        return "; ".join(line for line in words if line) or "nothing"

    def _run(self) -> None:
        with open(self._read_end, "rb", closefd=True) as lines:
            for line in lines:
                if self._forwarding.is_set():
                    os.write(2, line)
                else:
                    self._kept.append(line)
