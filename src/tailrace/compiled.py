"""How the kernels are compiled: by `compiled`, when they are first needed.

Kernels leave the interpreter's lock alone and are kept on disk. Those that allocate nothing are
compiled without numba's counting of references: each array that is passed to a function would cost an
atomic increment and a decrement, and with functions of a few instructions that was more than half of
the time of writing a document (2.5 µs before, 1.15 µs after). Arrays live in the caller for as long
as a kernel runs. That a kernel allocates nothing, numba sees to: it refuses to compile it otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba as nb
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher

#: Every kernel of the modules that are imported; what a kernel calls is before it.
KERNELS: list[Any] = []


def compiled(
    *signatures: Any, allocates: bool = False, inlined: bool = False, error_model: str = "python"
) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes a kernel of a function, for arguments of these signatures alone.

    It is loaded from numba's cache, or compiled, when it is called for the first time, or when a kernel
    that calls it is compiled. A process needs few kernels, and those on disk contain what they call:
    to load all of them at every start took half a second.

    :param allocates: it makes arrays.
    :param inlined: it becomes part of each kernel that calls it: a call, with an array's seven numbers, takes
        as long as reading a short text does.
    :param error_model: of numba: what a division by zero does.
    """

    def made(function: Callable[..., Any]) -> Any:
        # What is not given, a callee that is compiled on behalf of its caller would inherit from it.
        # `_nrt` is not public: the locked version of numba has it.
        options: dict[str, Any] = {"_nrt": allocates, "forceinline": inlined, "error_model": error_model}
        kernel: Any = nb.njit(nogil=True, cache=True, **options)(function)
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


def load_all() -> None:
    """Load every kernel of the modules that are imported; compile those that are in no cache."""
    for kernel in KERNELS:
        _load(kernel)


class _Unloaded(CPUDispatcher):
    # A kernel until it is needed. It then becomes what numba made, and calls cost what they always do.
    # To load it in numba's own `_compile_for_args` would be too late: a call on another thread that has begun
    # meanwhile takes for granted that it may compile, and then refuses arguments that have to be converted.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _load(self)
        return self(*args, **kwargs)

    def get_call_template(self, args: Any, kws: Any) -> Any:
        # Asked when a caller is compiled; by the kernel itself, too, if it calls itself.
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
