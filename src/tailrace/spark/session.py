"""The Spark session of a pipeline: local by default, quick to start, ready for Delta."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.errors import Kind, TailraceError
from tailrace.secrets import redact
from tailrace.spark.java import cores_of, launch_jvm, require_java
from tailrace.spark.jobs import on_every_core
from tailrace.warm import load_kernels

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from tailrace.config import SparkConfig

#: Spark's default is local; `*` takes every core.
DEFAULT_MASTER = "local[*]"

#: Where `make setup` and an installer may put Delta's jars, below the environment's prefix.
JARS_BELOW_PREFIX = Path("share", "tailrace", "jars")

#: Tasks that warm workers start together on a machine that is not overloaded.
_WARM_TASK_S = 0.3

#: Of what Java says when Spark did not start.
_WORDS_CHARS_MAX = 300
#: A process whose connection broke is gone within so many seconds, or lives.
_DEATH_S = 0.5

#: Held while Spark is started, or stopped: by one thread at a time.
changing = threading.RLock()

_DEFAULTS: dict[str, str] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "2g",
    "spark.python.worker.reuse": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.shuffle.partitions": "4",
    # A merge's shuffles are small; adaptive planning costs more jobs than it saves work.
    "spark.sql.adaptive.coalescePartitions.initialPartitionNum": "4",
    # The tables' own logs are small: fifty tasks for each snapshot of one make commits slow.
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "4",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}

#: Where executors run on this machine, nobody else has to reach the driver. Those of a cluster do: there
#: Spark chooses the address.
_LOOPBACK = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}


def session(config: SparkConfig | None = None, app_name: str = "tailrace") -> SparkSession:
    """Return the process's Spark session; start it if there is none.

    :param config: master and settings of the pipeline; its settings win over the defaults here.
    :raises TailraceError: `ENVIRONMENT_UNFIT` if there is no fit Java, before anything is
        started or downloaded; `SPARK_FAILED` if Spark does not start.

    A session that runs already is returned as it is: two can't live in one process.
    """
    return session_or_new(config, app_name)[0]


def session_or_new(config: SparkConfig | None, app_name: str) -> tuple[SparkSession, bool]:
    """Return what `session` does, and whether it was started for this. Any thread.

    One whose Java process has died, or that was stopped under us, is not there: another one is started.
    :raises TailraceError: as `session`.
    """
    from pyspark import SparkContext

    with changing:
        _forget_dead()
        is_new = SparkContext._active_spark_context is None  # noqa: SLF001 — PySpark has no public way to ask
        return _session(config, app_name), is_new


class EngineSession:
    """The session that one engine works with: one that runs already, or one that is started for it.

    Any thread.
    """

    def __init__(self) -> None:
        #: What `get` returned last; it may have died since.
        self.found: SparkSession | None = None
        self._is_own = False
        self._is_over = False

    @property
    def is_gone(self) -> bool:
        """Whether there was a session, and it can't run jobs any more."""
        return self.found is not None and not is_alive(self.found)

    def get(self, config: SparkConfig | None, engine: str) -> SparkSession:
        """Return the session; started if there is none, and again if its JVM has died.

        :raises TailraceError: as `session`.
        """
        with changing:  # nobody else is given a session that is stopped at once
            if self.found is None or self.is_gone:
                self.found, self._is_own = session_or_new(config, f"tailrace {engine}")
                if self._is_over and self._is_own:
                    self.found.stop()
            return self.found

    def stop(self) -> None:
        """Stop the session if it was started for the engine; one that is still starting, when it is there."""
        self._is_over = True
        if self.found is not None and self._is_own:
            with changing:  # who asks for a session meanwhile gets a new one
                if not self.is_gone:
                    self.found.stop()


def is_alive(session: SparkSession) -> bool:
    """Return whether a session can still run jobs."""
    return _runs(session.sparkContext)


def _runs(context: SparkContext) -> bool:
    return _answers(lambda: not context._jsc.sc().isStopped())  # noqa: SLF001 - no public question


def _answers(question: Callable[[], bool]) -> bool:
    from py4j.protocol import Py4JError

    try:
        return question()
    except (Py4JError, OSError, AttributeError):
        return False


def _forget_dead() -> None:
    # PySpark keeps gateway and context in class attributes, also of a Java process that is gone, would give
    # them to the next session, and has no public way to drop them.
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    context, gateway = SparkContext._active_spark_context, SparkContext._gateway  # noqa: SLF001
    if context is not None:
        is_dead = not _runs(context)
    else:
        is_dead = gateway is not None and not _answers(lambda: gateway.jvm.java.lang.System.nanoTime() > 0)
    if is_dead:
        SparkContext._active_spark_context = None  # noqa: SLF001
        SparkContext._gateway = None  # noqa: SLF001
        SparkContext._jvm = None  # noqa: SLF001
        SparkSession._instantiatedSession = None  # noqa: SLF001


def _session(config: SparkConfig | None, app_name: str) -> SparkSession:
    require_java()
    # Workers are started by name; without these they would be whatever `python3` is on PATH.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    from py4j.protocol import Py4JError
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    if (running := SparkSession.getActiveSession()) is not None:
        return running
    settings = settings_of(config, app_name)
    with _interrupt_handler_kept():
        gateway = SparkContext._gateway or launch_jvm(settings)  # noqa: SLF001
        try:
            if SparkContext._active_spark_context is None:  # noqa: SLF001
                conf = SparkConf(loadDefaults=False, _jvm=gateway.jvm)
                conf.setAll(list(settings.items()))
                SparkContext(conf=conf, gateway=gateway)
            return SparkSession.builder.getOrCreate()
        except (Py4JError, PySparkException, OSError) as error:
            raise _not_started(error, getattr(gateway, "proc", None)) from error


def _not_started(error: Exception, java: subprocess.Popen[bytes] | None) -> TailraceError:
    with contextlib.suppress(subprocess.TimeoutExpired):
        if java is not None:
            status = java.wait(_DEATH_S)
            return TailraceError(
                Kind.SPARK_FAILED,
                f"start Spark: its Java process has ended, with status {status}",
                "Java wrote why to standard error, or the system has ended it, as for lack of memory; it is "
                "started again when Spark is needed next",
            )
    # Java's own words follow a line of py4j's, which says nothing.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    of_java = (line.removeprefix(":").strip() for line in lines if line.startswith(":"))
    words = next(of_java, lines[0] if lines else type(error).__name__)
    return TailraceError(
        Kind.SPARK_FAILED,
        f"start Spark: {redact(words)[:_WORDS_CHARS_MAX]}",
        "correct spark.master or spark.conf, if it speaks of them; Java's own lines are on standard error",
    )


def settings_of(config: SparkConfig | None, app_name: str) -> dict[str, str]:
    """Return every Spark setting of the session, the user's over ours."""
    user = {} if config is None else config.settings()
    master = DEFAULT_MASTER if config is None or config.master is None else config.master
    master = user.get("spark.master", master)
    settings = _DEFAULTS | {"spark.app.name": app_name, "spark.master": master}
    if master.startswith("local"):  # `local-cluster`, too
        settings |= _LOOPBACK
    for name, value in delta_jars(master).items():
        # The user's class path is added to Delta's jars.
        joint = ":" if name.endswith("ClassPath") else ","
        settings[name] = joint.join(filter(None, (value, user.get(name, ""))))
        user.pop(name, None)
    return settings | user


def delta_jars(master: str) -> dict[str, str]:
    """Return the settings that bring Delta's classes along.

    From the directory that the environment variable TAILRACE_JARS names, else from
    `share/tailrace/jars` of the Python environment; where there is neither, Spark fetches them
    (to the Ivy directory in the user's home).
    """
    named = os.environ.get("TAILRACE_JARS", "")
    directory = Path(named) if named else Path(sys.prefix) / JARS_BELOW_PREFIX
    jars = sorted(str(jar) for jar in directory.glob("*.jar") if not _is_sparks_own(jar.name))
    if not any(Path(jar).name.startswith("delta-spark") for jar in jars):
        return {"spark.jars.packages": delta_coordinates()}
    if cores_of(master) is not None:
        # `spark.jars` would copy each jar twice before it is used.
        return {"spark.driver.extraClassPath": ":".join(jars)}
    return {"spark.jars": ",".join(jars)}


def delta_coordinates() -> str:
    """Return the Maven coordinates of the Delta that fits the installed PySpark."""
    from importlib.metadata import version

    spark_line = ".".join(version("pyspark").split(".")[:2])
    return f"io.delta:delta-spark_{spark_line}_2.13:{version('delta-spark')}"


def _is_sparks_own(jar: str) -> bool:
    """Return whether Spark ships this artifact itself, whatever its version: Delta's dependencies
    include Spark's, and two versions of one class must not meet.
    """
    import pyspark

    own = Path(pyspark.__file__).parent / "jars"
    return any(own.glob(f"{_artifact(jar)}-[0-9]*.jar"))


def _artifact(jar: str) -> str:
    parts = jar.removesuffix(".jar").split("-")
    while len(parts) > 1 and parts[-1][:1].isdigit():
        parts.pop()
    return "-".join(parts)


@contextlib.contextmanager
def _interrupt_handler_kept() -> Iterator[None]:
    """PySpark takes SIGINT over when a context starts; the pipeline keeps its own handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def warm(spark: SparkSession) -> None:
    """Start the Python workers and load the decoding kernels in each of them; run a tiny job.

    Meant to run on a separate thread while capture connects. The kernels are compiled here
    first, if no cache has them, so that workers only load them.
    """
    load_kernels()
    on_every_core(spark, _prepare_worker)
    spark.range(1).write.format("noop").mode("overwrite").save()


def _prepare_worker(_: Iterable[int]) -> Iterator[None]:
    began = time.monotonic()
    load_kernels()
    # A worker that is done at once would get a second task, and the next one none.
    time.sleep(max(0.0, _WARM_TASK_S - (time.monotonic() - began)))
    return iter(())
