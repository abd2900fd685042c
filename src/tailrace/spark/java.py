"""What Spark needs before it is started: a Java that it can run on, and what its master's address says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

from tailrace.errors import Kind, TailraceError

#: The oldest release that Spark 4 runs on.
JAVA_VERSION_MIN = 17

_ANSWER_TIMEOUT_S = 30
_IN_PROCESS = re.compile(r"local(?:\[(?P<cores>\*|\d+)(?:,\s*\d+)?\])?")
_INSTALL = (
    f"install Java {JAVA_VERSION_MIN} or later (Debian and Ubuntu: `apt install openjdk-17-jre-headless`, "
    "macOS: `brew install openjdk@17`) and put it on PATH, or point JAVA_HOME at it"
)


def cores_of(master: str) -> int | None:
    """Return how many tasks run at a time under a master in this process; None for a cluster.

    `local-cluster[…]` is a cluster: its executors are processes of their own.
    """
    found = _IN_PROCESS.fullmatch(master.strip())
    if found is None:
        return None
    if found["cores"] == "*":
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(found["cores"] or 1)


def require_java() -> int:
    """Return the major version of the Java that Spark will start: JAVA_HOME's, else PATH's.

    :raises TailraceError: `ENVIRONMENT_UNFIT` if there is none, it does not run, or it is too old.
    """
    home = os.environ.get("JAVA_HOME", "")
    command = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if command is None:
        raise _unfit("look for Java: none on PATH, and JAVA_HOME is not set")
    try:
        answer = subprocess.run(
            [command, "-version"], capture_output=True, timeout=_ANSWER_TIMEOUT_S, check=True
        ).stderr.decode(errors="replace")
    except (OSError, subprocess.SubprocessError) as error:
        where = "that JAVA_HOME names" if home else "on PATH"
        raise _unfit(f"start the Java {where}, {command!r}: {type(error).__name__}") from error
    version = major_version(answer)
    if version is None:
        raise _unfit(f"ask {command!r} for its version: it does not tell one")
    if version < JAVA_VERSION_MIN:
        raise _unfit(f"look for Java: {command!r} is version {version}, Spark needs {JAVA_VERSION_MIN}")
    return version


def major_version(answer: str) -> int | None:
    """Return the major version that `java -version` reports; 8 for "1.8.0_402"."""
    found = re.search(r'version "(?:1\.)?(\d+)', answer)
    return int(found[1]) if found else None


def _unfit(message: str) -> TailraceError:
    return TailraceError(Kind.ENVIRONMENT_UNFIT, message, _INSTALL)
