"""How the kernels are compiled: the options of every `numba.njit` of this project.

Kernels leave the interpreter's lock alone and are kept on disk. Those that allocate nothing are
compiled without numba's counting of references: each array that is passed to a function would cost an
atomic increment and a decrement, and with functions of a few instructions that was more than half of
the time of writing a document (2.5 µs before, 1.15 µs after). Arrays live in the caller for as long
as a kernel runs. That a kernel allocates nothing, numba sees to: it refuses to compile it otherwise.
"""

from __future__ import annotations

from typing import Any

#: Of a kernel that allocates nothing. `_nrt` is not public: the locked version of numba has it.
KERNEL: dict[str, Any] = {"nogil": True, "cache": True, "_nrt": False}

#: Of a kernel that makes an array.
ALLOCATING: dict[str, Any] = {"nogil": True, "cache": True}
