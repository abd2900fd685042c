"""The Spark session of a pipeline: local by default, with Delta, and with settings for a fast start."""

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

#: Folder for Delta's jars below the environment's prefix, used by `make setup` and installers.
JARS_BELOW_PREFIX = Path("share", "tailrace", "jars")

#: Shortest duration of a task that warms a worker, in seconds: all of them start before the first one ends.
_WARM_TASK_S = 0.3

#: Limit of Java's message when Spark did not start, in characters.
_WORDS_CHARS_MAX = 300
#: Wait for the end of a process whose connection broke, in seconds; after that it is considered alive.
_DEATH_S = 0.5

#: Held by the thread that starts or stops Spark.
changing = threading.RLock()

_DEFAULTS: dict[str, str] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "2g",
    "spark.python.worker.reuse": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.shuffle.partitions": "4",
    # A merge's shuffles are small; adaptive planning costs more in jobs than it saves in work.
    "spark.sql.adaptive.coalescePartitions.initialPartitionNum": "4",
    # Delta's table logs are small: fifty tasks for each snapshot of one would make commits slow.
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "4",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}

#: The driver's address if executors run on this machine only. For a cluster, whose executors must reach the
#: driver, Spark chooses the address.
_LOOPBACK = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}


def session(config: SparkConfig | None = None, app_name: str = "tailrace") -> SparkSession:
    """Return the process's Spark session; start it if there is none.

    :param config: master and settings of the pipeline, which override the defaults here.
    :raises TailraceError: `ENVIRONMENT_UNFIT` if there is no suitable Java, before anything is
        started or downloaded; `SPARK_FAILED` if Spark does not start.

    A running session is returned unchanged: a process can't have two.
    """
    return session_or_new(config, app_name)[0]


def session_or_new(config: SparkConfig | None, app_name: str) -> tuple[SparkSession, bool]:
    """Return the session as `session` does, and whether this call has started it. Any thread.

    A session whose Java process has died, or that other code has stopped, is replaced by a new one.
    :raises TailraceError: as `session`.
    """
    from pyspark import SparkContext

    with changing:
        _forget_dead()
        is_new = SparkContext._active_spark_context is None  # noqa: SLF001 — PySpark has no public way to ask
        return _session(config, app_name), is_new


class EngineSession:
    """The session that one engine uses: one that runs already, or one that is started for the engine.

    Any thread.
    """

    def __init__(self) -> None:
        #: The session that `get` returned last; it may have died since.
        self.found: SparkSession | None = None
        self._is_own = False
        self._is_over = False

    @property
    def is_gone(self) -> bool:
        """Whether there was a session that can't run jobs any more."""
        return self.found is not None and not is_alive(self.found)

    def get(self, config: SparkConfig | None, engine: str) -> SparkSession:
        """Return the session; start it if there is none, or if its JVM has died.

        :raises TailraceError: as `session`.
        """
        with changing:  # no other engine gets a session that is stopped at once
            if self.found is None or self.is_gone:
                self.found, self._is_own = session_or_new(config, f"tailrace {engine}")
                if self._is_over and self._is_own:
                    self.found.stop()
            return self.found

    def stop(self) -> None:
        """Stop the session if it was started for the engine; if it is still starting, once it has started."""
        self._is_over = True
        if self.found is not None and self._is_own:
            with changing:  # other threads that call `session` meanwhile get a new one
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
    # PySpark keeps gateway and context in class attributes, even if the Java process has ended, would use
    # them for the next session, and has no public way to remove them.
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
    # Without these, Python workers would run with the `python3` that is on PATH.
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
                f"start Spark: its Java process has ended with status {status}",
                "Java wrote the reason to standard error, or the system has killed it, for example because "
                "there was no memory; it is started again when Spark is needed next",
            )
    # Java's message follows a line of py4j that has no information.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    of_java = (line.removeprefix(":").strip() for line in lines if line.startswith(":"))
    words = next(of_java, lines[0] if lines else type(error).__name__)
    return TailraceError(
        Kind.SPARK_FAILED,
        f"start Spark: {redact(words)[:_WORDS_CHARS_MAX]}",
        "correct spark.master or spark.conf if the message names them; Java's output is on standard error",
    )


def settings_of(config: SparkConfig | None, app_name: str) -> dict[str, str]:
    """Return every Spark setting of the session; the user's settings override the defaults."""
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
    """Return the settings that load Delta's classes.

    They are in the directory that the environment variable TAILRACE_JARS names, or else in
    `share/tailrace/jars` of the Python environment; if neither has them, Spark fetches them
    (into the Ivy directory in the user's home).
    """
    named = os.environ.get("TAILRACE_JARS", "")
    directory = Path(named) if named else Path(sys.prefix) / JARS_BELOW_PREFIX
    jars = sorted(str(jar) for jar in directory.glob("*.jar") if not _is_sparks_own(jar.name))
    if not any(Path(jar).name.startswith("delta-spark") for jar in jars):
        return {"spark.jars.packages": delta_coordinates()}
    if cores_of(master) is not None:
        # `spark.jars` would copy each jar twice before using it.
        return {"spark.driver.extraClassPath": ":".join(jars)}
    return {"spark.jars": ",".join(jars)}


def delta_coordinates() -> str:
    """Return the Maven coordinates of the Delta release for the installed PySpark."""
    from importlib.metadata import version

    spark_line = ".".join(version("pyspark").split(".")[:2])
    return f"io.delta:delta-spark_{spark_line}_2.13:{version('delta-spark')}"


def _is_sparks_own(jar: str) -> bool:
    """Return whether Spark ships this artifact itself, in any version: Delta's dependencies include
    Spark's, and no class may be loaded in two versions.
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
    """Restore the pipeline's handler of SIGINT, which PySpark replaces when a context starts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def warm(spark: SparkSession) -> None:
    """Start the Python workers, load the decoding kernels in each of them, and run a tiny job.

    To be called on a separate thread while capture connects. The kernels are compiled here
    first if they are not cached, so that workers only load them.
    """
    load_kernels()
    on_every_core(spark, _prepare_worker)
    spark.range(1).write.format("noop").mode("overwrite").save()


def _prepare_worker(_: Iterable[int]) -> Iterator[None]:
    began = time.monotonic()
    load_kernels()
    # A worker whose task ended at once would get a second task, and another worker none.
    time.sleep(max(0.0, _WARM_TASK_S - (time.monotonic() - began)))
    return iter(())
