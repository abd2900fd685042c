"""Is there a Java that Spark can run on? Asked before anything is downloaded or started."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

from tailrace.errors import Kind, TailraceError

#: The oldest release that Spark 4 runs on.
JAVA_VERSION_MIN = 17

_ANSWER_TIMEOUT_S = 30
_INSTALL = (
    f"install Java {JAVA_VERSION_MIN} or later (Debian and Ubuntu: `apt install openjdk-17-jre-headless`, "
    "macOS: `brew install openjdk@17`) and put it on PATH, or point JAVA_HOME at it"
)


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
    """Return the major version that `java -version` told; 8 for "1.8.0_402"."""
    found = re.search(r'version "(?:1\.)?(\d+)', answer)
    return int(found[1]) if found else None


def _unfit(message: str) -> TailraceError:
    return TailraceError(Kind.ENVIRONMENT_UNFIT, message, _INSTALL)
