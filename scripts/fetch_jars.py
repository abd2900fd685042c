"""Fetches sets of jars into .cache and checks them against their lock files.

    python scripts/fetch_jars.py delta kafka spark-kafka debezium debezium-vitess vitess [--lock]

Ivy is included in PySpark, so only Java is needed. A repeated run is fast: jars that match the lock
are kept. `--lock` writes the lock from the fetched jars; review that change.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pyspark

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
#: The folder in which tailrace looks for jars of this environment.
SHARE = Path(sys.prefix) / "share" / "tailrace"
TIMEOUT_S = 600
#: Timeouts of requests: Java's default is to wait for ever. Ivy then tries the next repository, and keeps
#: the files that it has for the next attempt.
CONNECT_TIMEOUT_MS, READ_TIMEOUT_MS = 15_000, 60_000
ATTEMPTS = 3
#: Interval of messages about the progress, in seconds.
TELL_S = 10


@dataclass(frozen=True)
class Jars:
    """A set of jars: Ivy's file, the lock file, and the name of the jars' folders."""

    ivy: Path
    lock: Path
    folder: str

    @property
    def directory(self) -> Path:
        """The folder of the jars."""
        return CACHE / self.folder


SETS = {
    "delta": Jars(ROOT / "scripts" / "ivy.xml", ROOT / "jars.lock", "jars"),
    "kafka": Jars(ROOT / "scripts" / "ivy-kafka.xml", ROOT / "jars-kafka.lock", "kafka"),
    "spark-kafka": Jars(
        ROOT / "scripts" / "ivy-spark-kafka.xml", ROOT / "jars-spark-kafka.lock", "spark-kafka"
    ),
    "debezium": Jars(ROOT / "scripts" / "ivy-debezium.xml", ROOT / "jars-debezium.lock", "debezium"),
    "debezium-vitess": Jars(
        ROOT / "scripts" / "ivy-debezium-vitess.xml", ROOT / "jars-debezium-vitess.lock", "debezium-vitess"
    ),
    "vitess": Jars(ROOT / "scripts" / "ivy-vitess.xml", ROOT / "jars-vitess.lock", "vitess-mysql"),
}


def sha256(path: Path) -> str:
    """Return the digest of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_lock(jars: Jars) -> dict[str, str]:
    """Return the SHA-256 of each jar, by file name."""
    lines = jars.lock.read_text("ascii").splitlines()
    return {name: digest for digest, name in (line.split() for line in lines)}


def fetch(jars: Jars) -> dict[str, Path]:
    """Fetch the jars with Ivy into its cache; return the path of each jar, by file name."""
    java = Path(os.environ["JAVA_HOME"], "bin", "java") if os.environ.get("JAVA_HOME") else "java"
    (ivy,) = Path(pyspark.__file__).parent.glob("jars/ivy-*.jar")
    fetched = CACHE / "ivy" / f"fetched-{jars.folder}"
    shutil.rmtree(fetched, ignore_errors=True)
    command = [
        java,
        f"-Divy.default.ivy.user.dir={CACHE / 'ivy'}",  # not in the home directory
        f"-Dsun.net.client.defaultConnectTimeout={CONNECT_TIMEOUT_MS}",
        f"-Dsun.net.client.defaultReadTimeout={READ_TIMEOUT_MS}",
        *("-jar", ivy, "-warn"),
        *("-ivy", jars.ivy),
        *("-cache", CACHE / "ivy" / "cache"),
        *("-confs", "default", "-types", "jar", "bundle"),
        *("-retrieve", f"{fetched}/[artifact]-[revision].[ext]"),
    ]
    for attempt in range(1, ATTEMPTS + 1):
        status, said = _run(command, jars.folder)
        if status == 0:
            return {path.name: path for path in fetched.glob("*.jar")}
        print(f"fetch {jars.folder}: attempt {attempt} of {ATTEMPTS} ended with status {status}", flush=True)
    sys.exit(f"fetch jars: Ivy ended with status {status}; can Maven Central be reached?\n{said}")


def _run(command: list[str | Path], folder: str) -> tuple[int, str]:
    """Run Ivy to its end or the timeout, printing its progress; return its status and output."""
    deadline = time.monotonic() + TIMEOUT_S
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            while True:
                try:
                    status = process.wait(TELL_S)
                    break
                except subprocess.TimeoutExpired:
                    if time.monotonic() > deadline:
                        status = -1
                        break
                here = sum(1 for path in (CACHE / "ivy" / "cache").rglob("*") if path.is_file())
                print(f"fetching {folder}: {here} files so far", flush=True)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        return status, output.read()[-3000:]


def install(jars: Jars, fetched: dict[str, Path], wanted: dict[str, str]) -> None:
    """Install the jars, each atomically, and remove those of an older lock."""
    if missing := wanted.keys() - fetched.keys():
        names = ", ".join(sorted(missing))
        sys.exit(f"fetch jars: {names} were not fetched; see {jars.lock.name} and scripts/{jars.ivy.name}")
    jars.directory.mkdir(parents=True, exist_ok=True)
    for name, digest in wanted.items():
        if (found := sha256(fetched[name])) != digest:
            sys.exit(f"fetch jars: {name} has SHA-256 {found}, {jars.lock.name} says {digest}; not installed")
        shutil.copyfile(fetched[name], jars.directory / f".{name}.tmp")
        os.replace(jars.directory / f".{name}.tmp", jars.directory / name)
    for old in jars.directory.glob("*.jar"):
        if old.name not in wanted:
            old.unlink()


def link(jars: Jars) -> None:
    """Link the jars into this environment, so that `tailrace` finds them from any directory."""
    place = SHARE / jars.folder
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(jars.directory, target_is_directory=True)


def bring(jars: Jars, *, lock: bool) -> None:
    """Install the jars of a set's lock; with `lock`, first rewrite the lock."""
    if lock:
        fetched = fetch(jars)
        lines = [f"{sha256(path)}  {name}\n" for name, path in sorted(fetched.items())]
        jars.lock.write_text("".join(lines), "ascii")
        install(jars, fetched, read_lock(jars))
    else:
        wanted = read_lock(jars)
        in_place = {path.name: sha256(path) for path in jars.directory.glob("*.jar")}
        if in_place != wanted:
            install(jars, fetch(jars), wanted)
    link(jars)


def main() -> None:
    """Install the named sets, or all of them."""
    names = [name for name in sys.argv[1:] if not name.startswith("-")] or list(SETS)
    if unknown := set(names) - set(SETS):
        sys.exit(f"fetch jars: {', '.join(sorted(unknown))}: known are {', '.join(SETS)}")
    for name in names:
        bring(SETS[name], lock="--lock" in sys.argv[1:])


if __name__ == "__main__":
    main()
