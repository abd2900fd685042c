"""MySQL's character sets: by the number of a collation, the tables that convert a text to Unicode.

VStream sends texts in the column's character set, whatever the connection's is.

Source: MySQL manual, "Supported Character Sets and Collations"; information_schema.collations.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

Points = npt.NDArray[np.int32]

#: In a table of code points: the byte, or pair of bytes, is not a character.
NO_CHARACTER = -1
#: In a table of code points, for a first byte: the character has a second byte.
TWO_BYTES = -2

#: Character sets whose bytes are valid UTF-8; `binary` is that of values without a character set.
UTF8 = frozenset({"utf8mb4", "utf8mb3", "ascii", "binary"})

# The numbers of collations by character set; first the ranges, inclusive, of sets that have many.
_RANGES = (
    ("utf8mb3", 192, 215),
    ("utf8mb4", 224, 247),
    ("utf8mb4", 255, 323),
    ("ucs2", 128, 151),
    ("utf16", 101, 124),
    ("utf32", 160, 183),
)
_NUMBERS = {
    "ascii": (11, 65),
    "binary": (63,),
    "utf8mb3": (33, 76, 83, 223),
    "utf8mb4": (45, 46),
    "ucs2": (35, 90, 159),
    "utf16": (54, 55),
    "utf16le": (56, 62),
    "utf32": (60, 61),
    "latin1": (5, 8, 15, 31, 47, 48, 49, 94),
    "latin2": (2, 9, 21, 27, 77),
    "latin5": (30, 78),
    "latin7": (20, 41, 42, 79),
    "cp1250": (26, 34, 44, 66, 99),
    "cp1251": (14, 23, 50, 51, 52),
    "cp1256": (57, 67),
    "cp1257": (29, 58, 59),
    "cp850": (4, 80),
    "cp852": (40, 81),
    "cp866": (36, 68),
    "koi8r": (7, 74),
    "koi8u": (22, 75),
    "greek": (25, 70),
    "hebrew": (16, 71),
    "tis620": (18, 89),
    "macce": (38, 43),
    "macroman": (39, 53),
    "big5": (1, 84),
    "gbk": (28, 87),
    "gb2312": (24, 86),
    "euckr": (19, 85),
    "sjis": (13, 88),
    "cp932": (95, 96),
}
# Python's names of the codecs. MySQL's latin1 is Windows-1252 plus the bytes that it leaves undefined.
_CODECS = {
    "latin1": "cp1252",
    "latin2": "iso8859_2",
    "latin5": "iso8859_9",
    "latin7": "iso8859_13",
    "koi8r": "koi8_r",
    "koi8u": "koi8_u",
    "greek": "iso8859_7",
    "hebrew": "iso8859_8",
    "tis620": "tis_620",
    "macce": "mac_latin2",
    "macroman": "mac_roman",
    "euckr": "cp949",
    "sjis": "shift_jis",
}
#: Characters that MySQL maps differently from Python's codec, or that only MySQL has.
_DIFFERENT = {
    "cp866": {b"\xfc": 0x207F, b"\xfd": 0xB2},
    "koi8u": {b"\x95": 0x2022},
    "greek": {b"\xa1": 0x2BD, b"\xa2": 0x2BC},
    "hebrew": {b"\xaf": 0x203E},
    "sjis": {b"\x81\x5f": 0x5C},
    "big5": {
        b"\xf9" + bytes([byte]): point
        for byte, point in enumerate((0x7881, 0x92B9, 0x88CF, 0x58BB, 0x6052, 0x7CA7, 0x5AFA), 0xD6)
    },
}
_WIDE = frozenset({"big5", "gbk", "gb2312", "euckr", "sjis", "cp932"})


@functools.cache
def charset_of(collation: int) -> str | None:
    """Return the character set of a collation's number; None if it is not supported."""
    for name, numbers in _NUMBERS.items():
        if collation in numbers:
            return name
    return next((name for name, first, last in _RANGES if first <= collation <= last), None)


@functools.cache
def points(charset: str) -> Points:
    """Return the code points of a character set: 256, by the first byte; if some of them are `TWO_BYTES`,
    65536 more follow, by both bytes.
    """
    codec = _CODECS.get(charset, charset)
    first = np.array([_point(bytes([byte]), codec) for byte in range(256)], np.int32)
    if charset == "latin1":
        lacking = first == NO_CHARACTER
        first[lacking] = np.arange(256, dtype=np.int32)[lacking]
    different = _DIFFERENT.get(charset, {})
    for character, point in different.items():
        if len(character) == 1:
            first[character[0]] = point
    if charset not in _WIDE:
        return first
    both = np.full((256, 256), NO_CHARACTER, np.int32)
    for lead in np.flatnonzero(first == NO_CHARACTER).tolist():
        for byte in range(0x30, 256):
            character = bytes([lead, byte])
            both[lead, byte] = different.get(character) or _point(character, codec)
        if (both[lead] != NO_CHARACTER).any():
            first[lead] = TWO_BYTES
    return np.concatenate((first, both.ravel()))


def _point(character: bytes, codec: str) -> int:
    try:
        text = character.decode(codec)
    except UnicodeDecodeError:
        return NO_CHARACTER
    return ord(text) if len(text) == 1 else NO_CHARACTER
