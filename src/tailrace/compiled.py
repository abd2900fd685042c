"""The decorator `compiled`, which compiles kernels with numba when they are first needed.

Kernels release the interpreter's lock and are cached on disk. Kernels that allocate nothing are compiled
without numba's reference counting: each array that is passed to a function would cost an atomic increment
and decrement, which with functions of a few instructions took more than half of the time for writing a
document (2.5 µs before, 1.15 µs after). The caller keeps arrays alive while a kernel runs. numba verifies
that such a kernel allocates nothing: it refuses to compile it otherwise.

A kernel is kept beside its module, or in a folder of the user where the package is read-only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba as nb
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher

#: Where numba looks for a folder that it can write to, in this order: the one that NUMBA_CACHE_DIR names, the
#: module's, that of `UserFolderLocator`, whose module is imported only then, and numba's for a zip file.
_LOCATORS = (
    "UserProvidedCacheLocator,InTreeCacheLocator,tailrace.kernel_cache.UserFolderLocator,ZipCacheLocator"
)

#: All kernels of the imported modules; a kernel comes after the kernels that it calls.
KERNELS: list[Any] = []


def compiled(
    *signatures: Any, allocates: bool = False, inlined: bool = False, error_model: str = "python"
) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that turns a function into a kernel for arguments of these signatures only.

    The kernel is loaded from numba's cache, or compiled, on its first call or when a kernel that calls it is
    compiled. A process needs few kernels, and a cached kernel contains the kernels that it calls; loading
    all of them at every start took half a second.

    :param allocates: whether it creates arrays.
    :param inlined: whether it is inlined into each kernel that calls it: a call, which passes seven numbers
        per array, takes as long as reading a short text.
    :param error_model: numba's: the effect of a division by zero.
    """

    def made(function: Callable[..., Any]) -> Any:
        # All options are set: a callee that is compiled for its caller inherits options that are not.
        # `_nrt` is not public: the locked version of numba has it.
        options: dict[str, Any] = {"_nrt": allocates, "forceinline": inlined, "error_model": error_model}
        config: Any = nb.config
        chosen = config.CACHE_LOCATOR_CLASSES  # by the user; for all of the process
        config.CACHE_LOCATOR_CLASSES = chosen or _LOCATORS
        try:
            kernel: Any = nb.njit(nogil=True, cache=True, **options)(function)
        finally:
            config.CACHE_LOCATOR_CLASSES = chosen
        kernel.declared = signatures
        kernel.__class__ = _Unloaded
        KERNELS.append(kernel)
        return kernel

    return made


def iterated(function: Callable[..., Any]) -> Any:
    """Make of a function a generator that kernels go through.

    It can neither be inlined nor be given a signature: it is compiled as a part of each kernel that it is
    called by, and kept with that one.
    """
    return nb.njit(function)


def load_all(on_compile: Callable[[], None] = lambda: None) -> bool:
    """Load all kernels of the imported modules; return whether some were not cached, and were compiled.

    :param on_compile: called once, after the first kernel that was not cached.
    """
    compiles = False
    for kernel in KERNELS:
        _load(kernel)
        if not compiles and kernel.stats.cache_misses:
            compiles = True
            on_compile()
    return compiles


class _Unloaded(CPUDispatcher):
    # A kernel before its first use. Loading sets its class back to numba's, so later calls have no overhead.
    # Loading in numba's own `_compile_for_args` would be too late: a concurrent call on another thread
    # assumes that it may compile, and then refuses arguments that need a conversion.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _load(self)
        return self(*args, **kwargs)

    def get_call_template(self, args: Any, kws: Any) -> Any:
        # Called when a caller is compiled, which may be the kernel itself.
        _load(self)
        return CPUDispatcher.get_call_template(self, args, kws)

    def __reduce__(self) -> Any:
        _load(self)
        return self.__reduce__()


@global_compiler_lock  # type: ignore[untyped-decorator]
def _load(kernel: Any) -> None:
    if type(kernel) is CPUDispatcher or kernel.is_compiling:
        return
    for signature in kernel.declared:
        kernel.compile(signature)
    kernel.disable_compile()
    kernel.__class__ = CPUDispatcher
