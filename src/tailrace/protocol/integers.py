"""PostgreSQL's integers as kernels read them: most significant byte first.

Nothing is checked: the caller knows that the bytes are there.
"""

from __future__ import annotations

import numba as nb
import numpy as np


@nb.njit(inline="always")
def u16_at(b, i):  # type: ignore[no-untyped-def]
    """Return the two bytes at `i` as a number from 0."""
    return (np.int64(b[i]) << 8) | np.int64(b[i + 1])


@nb.njit(inline="always")
def u32_at(b, i):  # type: ignore[no-untyped-def]
    """Return the four bytes at `i` as a number from 0."""
    return (
        (np.int64(b[i]) << 24) | (np.int64(b[i + 1]) << 16) | (np.int64(b[i + 2]) << 8) | np.int64(b[i + 3])
    )


@nb.njit(inline="always")
def i64_at(b, i):  # type: ignore[no-untyped-def]
    """Return the eight bytes at `i` as a signed number."""
    return (u32_at(b, i) << 32) | u32_at(b, i + 4)
