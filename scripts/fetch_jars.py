"""Fetch the jars that scripts/ivy.xml names into .cache/jars and check them against jars.lock.

Ivy ships inside PySpark, so that Java is all it takes. Runs again at no cost: jars that match
the lock are kept. `--lock` writes jars.lock from what was fetched; review that change.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyspark

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "jars.lock"
JARS = ROOT / ".cache" / "jars"
#: Where tailrace.spark.session looks for jars that belong to this environment.
LINK = Path(sys.prefix) / "share" / "tailrace" / "jars"
TIMEOUT_S = 600


def sha256(path: Path) -> str:
    """Return the digest of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_lock() -> dict[str, str]:
    """Return file name → SHA-256."""
    lines = LOCK.read_text("ascii").splitlines()
    return {name: digest for digest, name in (line.split() for line in lines)}


def fetch() -> dict[str, Path]:
    """Have Ivy fetch into its cache; return file name → path of each jar."""
    java = Path(os.environ["JAVA_HOME"], "bin", "java") if os.environ.get("JAVA_HOME") else "java"
    (ivy,) = Path(pyspark.__file__).parent.glob("jars/ivy-*.jar")
    fetched = ROOT / ".cache" / "ivy" / "fetched"
    shutil.rmtree(fetched, ignore_errors=True)
    command = [
        java,
        f"-Divy.default.ivy.user.dir={ROOT / '.cache' / 'ivy'}",  # nothing into the home directory
        *("-jar", ivy, "-warn"),
        *("-ivy", ROOT / "scripts" / "ivy.xml"),
        *("-cache", ROOT / ".cache" / "ivy" / "cache"),
        *("-confs", "default", "-types", "jar", "bundle"),
        *("-retrieve", f"{fetched}/[artifact]-[revision].[ext]"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    if done.returncode != 0:
        sys.exit(
            f"fetch jars: Ivy ended with status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return {path.name: path for path in fetched.glob("*.jar")}


def install(fetched: dict[str, Path], wanted: dict[str, str]) -> None:
    """Put the jars in place, none half-written, and remove those of an older lock."""
    if missing := wanted.keys() - fetched.keys():
        sys.exit(f"fetch jars: {', '.join(sorted(missing))} did not come; see jars.lock and scripts/ivy.xml")
    JARS.mkdir(parents=True, exist_ok=True)
    for name, digest in wanted.items():
        if (found := sha256(fetched[name])) != digest:
            sys.exit(f"fetch jars: {name} has SHA-256 {found}, jars.lock says {digest}; not installed")
        shutil.copyfile(fetched[name], JARS / f".{name}.tmp")
        os.replace(JARS / f".{name}.tmp", JARS / name)
    for old in JARS.glob("*.jar"):
        if old.name not in wanted:
            old.unlink()


def link() -> None:
    """Let this environment's `tailrace` find the jars, from whatever directory it is run."""
    LINK.parent.mkdir(parents=True, exist_ok=True)
    LINK.unlink(missing_ok=True)
    LINK.symlink_to(JARS, target_is_directory=True)


def main() -> None:
    """Bring .cache/jars to what jars.lock says; with --lock, first write that anew."""
    if "--lock" in sys.argv[1:]:
        fetched = fetch()
        lines = [f"{sha256(path)}  {name}\n" for name, path in sorted(fetched.items())]
        LOCK.write_text("".join(lines), "ascii")
        install(fetched, read_lock())
    else:
        wanted = read_lock()
        in_place = {path.name: sha256(path) for path in JARS.glob("*.jar")}
        if in_place != wanted:
            install(fetch(), wanted)
    link()


if __name__ == "__main__":
    main()
