"""HMAC-SHA-256 of many texts at once, as hexadecimal digits.

Compiled, since one call of the standard library's for each value costs three times as much and
holds the interpreter's lock. The salt's own blocks are hashed once.

Source: FIPS 180-4 (SHA-256), RFC 2104 (HMAC).
"""

from __future__ import annotations

import hashlib

import numba as nb
import numpy as np
import pyarrow as pa

from tailrace.compiled import ALLOCATING, KERNEL
from tailrace.protocol.frames import FROZEN_BYTES, Bytes
from tailrace.protocol.memory import u32_at

#: Hexadecimal digits of a hash.
HASH_LENGTH = 64

_BLOCK = 64
_STATE = 8
_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)


def _fractions(roots: int, power: float) -> list[int]:
    # The first 32 bits of the fractional parts of roots of the first primes, as FIPS 180-4 has it.
    primes = [n for n in range(2, 312) if all(n % d for d in range(2, n))][:roots]
    return [_root_fraction(prime, power) for prime in primes]


def _root_fraction(prime: int, power: float) -> int:
    exponent = round(1 / power)
    wanted = prime << (32 * exponent)
    low, high = 0, 1 << 40
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle**exponent <= wanted else (low, middle)
    return low & 0xFFFFFFFF


_FIRST = np.array(_fractions(_STATE, 1 / 2), np.uint32)
_ROUNDS = np.array(_fractions(_BLOCK, 1 / 3), np.uint32)


@nb.njit(inline="always")
def _rotated(x, n):  # type: ignore[no-untyped-def]
    return np.uint32((x >> np.uint32(n)) | np.uint32(x << np.uint32(32 - n)))


@nb.njit(nb.void(nb.uint32[::1], FROZEN_BYTES, nb.int64, nb.uint32[::1]), **KERNEL)
def _take_block(state, b, p, w):  # type: ignore[no-untyped-def]
    # `w` is room for 64 words.
    for t in range(16):
        w[t] = np.uint32(u32_at(b, p + 4 * t))
    for t in range(16, 64):
        x, y = w[t - 15], w[t - 2]
        s0 = _rotated(x, 7) ^ _rotated(x, 18) ^ np.uint32(x >> np.uint32(3))
        s1 = _rotated(y, 17) ^ _rotated(y, 19) ^ np.uint32(y >> np.uint32(10))
        w[t] = np.uint32(w[t - 16] + s0 + w[t - 7] + s1)
    a, bb, c, d = state[0], state[1], state[2], state[3]
    e, f, g, h = state[4], state[5], state[6], state[7]
    for t in range(64):
        s1 = _rotated(e, 6) ^ _rotated(e, 11) ^ _rotated(e, 25)
        chosen = (e & f) ^ (~e & g)
        t1 = np.uint32(h + s1 + np.uint32(chosen) + _ROUNDS[t] + w[t])
        s0 = _rotated(a, 2) ^ _rotated(a, 13) ^ _rotated(a, 22)
        most = (a & bb) ^ (a & c) ^ (bb & c)
        h, g, f, e = g, f, e, np.uint32(d + t1)
        d, c, bb, a = c, bb, a, np.uint32(t1 + np.uint32(s0 + np.uint32(most)))
    state[0] = np.uint32(state[0] + a)
    state[1] = np.uint32(state[1] + bb)
    state[2] = np.uint32(state[2] + c)
    state[3] = np.uint32(state[3] + d)
    state[4] = np.uint32(state[4] + e)
    state[5] = np.uint32(state[5] + f)
    state[6] = np.uint32(state[6] + g)
    state[7] = np.uint32(state[7] + h)


@nb.njit(inline="always")
def _end_block(block, used, hashed):  # type: ignore[no-untyped-def]
    # Closes the last block: zeros from `used` on, then the length of all that was hashed, in bits.
    for k in range(used, _BLOCK - 8):
        block[k] = 0
    bits = hashed * 8
    for k in range(8):
        block[_BLOCK - 1 - k] = np.uint8((bits >> (8 * k)) & 255)


@nb.njit(
    nb.void(FROZEN_BYTES, nb.int64[::1], nb.uint32[::1], nb.uint32[::1], nb.uint8[::1]),
    **ALLOCATING,
)
def _hash_all(b, offsets, inner, outer, out):  # type: ignore[no-untyped-def]
    block = np.zeros(_BLOCK, np.uint8)
    w = np.empty(64, np.uint32)
    state = np.empty(_STATE, np.uint32)
    for r in range(len(offsets) - 1):
        at, end = offsets[r], offsets[r + 1]
        size = end - at
        state[:] = inner
        while end - at >= _BLOCK:
            _take_block(state, b, at, w)
            at += _BLOCK
        used = end - at
        for k in range(used):
            block[k] = b[at + k]
        block[used] = 0x80
        used += 1
        if used > _BLOCK - 8:
            for k in range(used, _BLOCK):
                block[k] = 0
            _take_block(state, block, 0, w)
            used = 0
        _end_block(block, used, _BLOCK + size)
        _take_block(state, block, 0, w)
        for k in range(_STATE):
            for shift in range(4):
                block[4 * k + shift] = np.uint8((state[k] >> np.uint32(24 - 8 * shift)) & np.uint32(255))
        block[32] = 0x80
        _end_block(block, 33, _BLOCK + 32)
        state[:] = outer
        _take_block(state, block, 0, w)
        for k in range(_STATE):
            for digit in range(8):
                place = (state[k] >> np.uint32(28 - 4 * digit)) & np.uint32(15)
                out[HASH_LENGTH * r + 8 * k + digit] = _DIGITS[place]


def hashed_texts(texts: pa.StringArray, salt: bytes) -> Bytes:
    """Return the digits of every text's hash, one after another; the texts have no NULL."""
    key = hashlib.sha256(salt).digest() if len(salt) > _BLOCK else salt
    padded = np.frombuffer(key.ljust(_BLOCK, b"\0"), np.uint8)
    inner, outer = _FIRST.copy(), _FIRST.copy()
    room = np.empty(64, np.uint32)
    _take_block(inner, padded ^ np.uint8(0x36), 0, room)
    _take_block(outer, padded ^ np.uint8(0x5C), 0, room)
    _, ends, data = texts.buffers()
    offsets = np.frombuffer(ends, np.int32)[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
    out = np.empty(HASH_LENGTH * len(texts), np.uint8)
    _hash_all(np.frombuffer(data or b"", np.uint8), offsets, inner, outer, out)
    return out
