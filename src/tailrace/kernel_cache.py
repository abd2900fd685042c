"""The folder in which compiled kernels are kept for a user who may not write to the package."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any

from numba.core.caching import InTreeCacheLocator


class UserFolderLocator(InTreeCacheLocator):
    """The folder of a module's kernels for a user who may not write to the package.

    It begins with the kernels that the package has, such as those that `python -m tailrace.warm` compiled
    into an image. They are not used where they are: if they are for another processor, numba writes others.
    """

    def __init__(self, function: Any, file: str) -> None:
        super().__init__(function, file)  # type: ignore[no-untyped-call]
        self._of_package = Path(self._cache_path)
        name = self.get_suitable_cache_subpath(file)  # type: ignore[no-untyped-call]
        self._cache_path = os.path.join(_user_folder(), name)

    def ensure_cache_path(self) -> None:
        """Create the folder unless it exists."""
        if os.path.isdir(self._cache_path):
            return
        # Whole or not at all: other processes may do the same.
        new = tempfile.mkdtemp(dir=os.path.dirname(self._cache_path))
        try:
            for file in self._of_package.glob("*.nb[ci]"):
                shutil.copyfile(file, os.path.join(new, file.name))
            os.rename(new, self._cache_path)
        except OSError:
            shutil.rmtree(new, ignore_errors=True)
            if not os.path.isdir(self._cache_path):
                raise


@functools.cache
def _user_folder() -> str:
    # Code is loaded from there, so it must be this user's alone. Users of containers often have no home.
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    for folder in (f"{home}/tailrace/kernels", f"{tempfile.gettempdir()}/tailrace-kernels-{os.getuid()}"):
        if os.path.isabs(folder):
            with contextlib.suppress(OSError):
                os.makedirs(folder, mode=0o700, exist_ok=True)
                found = os.lstat(folder)
                is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
                if is_own and not found.st_mode & 0o022 and os.access(folder, os.W_OK):
                    return folder
    return tempfile.mkdtemp(prefix="tailrace-kernels-")
