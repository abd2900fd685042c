r"""Converts text to UTF-8 from database encodings in which some bytes have no character.

The server ends a command at the first text that it can't convert: one invalid value would stop its table's
snapshot, one invalid name every query of the catalogue, and either would stop the stream permanently. So the
server does not convert the text of such a database; each character is looked up once on the server. Text with
bytes that have no character is returned in bytea's format (`\x63616681`), as is text of SQL_ASCII that is not
UTF-8, which can't be converted. In commands, a name in that format means its bytes.

This does not affect a database in UTF8, or in an encoding in which every byte is a character (LATIN1).
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Self

import numpy as np

from tailrace.errors import REPORT_STREAM, Kind, TailraceError
from tailrace.protocol.frames import XLOG_PAYLOAD_AT, Bytes, each_frame
from tailrace.sources.postgres.connection.errors import UNCONVERTIBLE

if TYPE_CHECKING:
    from tailrace.sources.postgres.connection.session import Session

SQL_ASCII = "SQL_ASCII"

#: Characters of EUC: in EUC_TW three bytes follow 8E, else two follow 8F; any other high byte begins a pair.
_EUC_TW = re.compile(rb"\x8e[\x80-\xff]{3}|[\x80-\xff]{1,2}")
_EUC = re.compile(rb"\x8f[\x80-\xff]{2}|[\x80-\xff]{1,2}")
_SINGLE_BYTE = re.compile(rb"[\x80-\xff]")

#: pgoutput's messages with text: changes of rows, and messages with names.
_HAVE_TEXTS = (b"I", b"U", b"D", b"R", b"Y", b"M", b"O")
_HAVE_NAMES = (b"R", b"Y")

_FIELD = re.compile(rb"[^\t\n]+")
_ESCAPE = re.compile(rb"\\(.)", re.DOTALL)
_ESCAPED = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}
_JSON_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
#: A quoted name whose bytes have no characters.
_QUOTED_NAME = re.compile(rb'"\\x((?:[0-9a-f]{2})*?[89a-f][0-9a-f](?:[0-9a-f]{2})*)"')

#: By version of the server and encoding: the UTF-8 of characters, None for invalid ones, some ten thousand at
#: most; and whether every byte is a character.
_known: dict[tuple[int, str], dict[bytes, bytes | None]] = {}
_is_whole: dict[tuple[int, str], bool] = {}


class _NoCharacterError(Exception):
    """Raised for bytes that have no character."""


def own_encoding(session: Session) -> str | None:
    """Return the database's encoding if some bytes have no character in it; None if the server can convert
    every text to UTF-8.

    :param session: not in a transaction.
    """
    name = session.server_encoding
    if name in {"UTF8", SQL_ASCII}:
        return None if name == "UTF8" else name
    key = (session.server_version, name)
    if key not in _is_whole:
        _is_whole[key] = _utf8_of(session, bytes(range(0x80, 0x100)), name) is not None
    return None if _is_whole[key] else name


class TextEncoding:
    """Converts text in a database's encoding to UTF-8. One thread.

    :param connect: opens a session for SQL; called for the first unknown character.
    """

    def __init__(self, name: str, server_version: int, connect: Callable[[], Session]) -> None:
        self.name = name
        self._connect = connect
        self._session: Session | None = None
        self._known = _known.setdefault((server_version, name), {})
        euc = _EUC_TW if name == "EUC_TW" else _EUC
        self._characters = euc if name.startswith("EUC_") else _SINGLE_BYTE

    @classmethod
    def of(cls, session: Session, connect: Callable[[], Session]) -> Self | None:
        """Return the converter for text of `session`'s database; None if the server converts it.

        :param session: not in a transaction.
        """
        name = own_encoding(session)
        return None if name is None else cls(name, session.server_version, connect)

    def encoded(self, command: str) -> bytes:
        """Return a command in the database's encoding, with names in hexadecimal form as their bytes.

        :raises TailraceError: `SOURCE_QUERY_FAILED` if the encoding lacks one of its characters.
        """
        raw = command.encode()
        if self.name != SQL_ASCII and not raw.isascii():
            raw = b"".join(letter.encode() if letter.isascii() else self._own(letter) for letter in command)
        return _QUOTED_NAME.sub(_name_of, raw)

    def text(self, raw: bytes) -> bytes:
        """Return a text as UTF-8, or the hexadecimal form of its bytes.

        :raises TailraceError: as `Session.run`.
        """
        try:
            return self._converted(raw)
        except _NoCharacterError:
            return _hexadecimal(raw)

    def json(self, raw: bytes) -> bytes:
        """Return a JSON document as UTF-8, each of its strings converted as by `text`.

        :raises TailraceError: as `Session.run`.
        """
        try:
            return self._converted(raw)
        except _NoCharacterError:
            return _JSON_STRING.sub(self._json_string, raw)

    def rows(self, text: bytes) -> bytes:
        """Return complete lines in COPY's format as UTF-8.

        :raises TailraceError: as `Session.run`.
        """
        try:
            return self._converted(text)  # no character contains a separator of fields
        except _NoCharacterError:
            return _FIELD.sub(self._field, text)

    def changes(self, chunk: Bytes) -> Bytes:
        """Return complete frames of the stream with text as UTF-8; `chunk` itself if nothing changes.

        :raises TailraceError: as `Session.run`; `PROTOCOL_VIOLATION` for an invalid message.
        """
        return _rewritten(chunk, _HAVE_TEXTS, self.text)

    def close(self) -> None:
        """Close the session, if there is one."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _converted(self, raw: bytes) -> bytes:
        if raw.isascii():
            return raw
        if self.name != SQL_ASCII:
            return self._characters.sub(self._character, raw)
        if not _is_utf8(raw):
            raise _NoCharacterError
        return raw

    def _json_string(self, match: re.Match[bytes]) -> bytes:
        try:
            return self._converted(match[0])
        except _NoCharacterError:
            value: str = json.loads(match[0].decode(errors="surrogateescape"))
            return json.dumps(_hexadecimal(value.encode(errors="surrogateescape")).decode()).encode()

    def _own(self, letter: str) -> bytes:
        """Return a character's bytes in the database's encoding."""
        if self._session is None:
            self._session = self._connect()
        raw = _convert(self._session, letter.encode(), "UTF8", self.name)
        if raw is None:
            raise TailraceError(
                Kind.SOURCE_QUERY_FAILED,
                f"send a command: the database's encoding {self.name} does not have all of its characters",
                "names and conditions can have only characters that the database's encoding has",
            )
        return raw

    def _character(self, match: re.Match[bytes]) -> bytes:
        raw = match[0]
        if raw not in self._known:
            if self._session is None:
                self._session = self._connect()
            self._known[raw] = _utf8_of(self._session, raw, self.name)
        utf8 = self._known[raw]
        if utf8 is None:
            raise _NoCharacterError
        return utf8

    def _field(self, match: re.Match[bytes]) -> bytes:
        raw = match[0]
        try:
            return self._converted(raw)
        except _NoCharacterError:
            value = _ESCAPE.sub(lambda escape: _ESCAPED.get(escape[1], escape[1]), raw)
            return b"\\" + _hexadecimal(value)


class _Message:
    """Copies a pgoutput message (protocol version 1) and converts its text."""

    def __init__(self, body: bytes, text: Callable[[bytes], bytes]) -> None:
        self._body = body
        self._text = text
        self._at = 0
        self._out = bytearray()

    def converted(self) -> bytes:
        kind = self._body[:1]
        if kind in {b"I", b"U", b"D"}:
            self._copy(5)
            while self._at < len(self._body):
                self._copy(1)  # the type of tuple
                self._tuple()
        elif kind == b"R":
            self._copy(5)
            self._name()
            self._name()
            self._copy(1)
            for _ in range(self._number("!H")):
                self._copy(1)
                self._name()
                self._copy(8)
        elif kind == b"Y":
            self._copy(5)
            self._name()
            self._name()
        elif kind in {b"M", b"O"}:
            self._copy(10 if kind == b"M" else 9)
            self._name()
        self._out += self._body[self._at :]
        return bytes(self._out)

    def _tuple(self) -> None:
        for _ in range(self._number("!H")):
            kind = self._body[self._at]
            self._copy(1)
            if kind in b"nu":
                continue
            [size] = struct.unpack_from("!I", self._body, self._at)
            value = self._body[self._at + 4 : self._at + 4 + size]
            if len(value) < size:
                raise IndexError
            self._at += 4 + size
            value = value if kind != ord("t") or value.isascii() else self._text(value)
            self._out += struct.pack("!I", len(value)) + value

    def _number(self, form: str) -> int:
        [number] = struct.unpack_from(form, self._body, self._at)
        self._copy(struct.calcsize(form))
        return int(number)

    def _name(self) -> None:
        end = self._body.index(b"\0", self._at)
        self._out += self._text(self._body[self._at : end]) + b"\0"
        self._at = end + 1

    def _copy(self, size: int) -> None:
        if size > len(self._body) - self._at:
            raise IndexError
        self._out += self._body[self._at : self._at + size]
        self._at += size


def names_in_utf8(chunk: Bytes) -> Bytes:
    """Return complete frames in which names of relations, columns and types that are not UTF-8 are in
    hexadecimal form; `chunk` itself if all are UTF-8. Only SQL_ASCII has others.

    :raises TailraceError: `PROTOCOL_VIOLATION` for an invalid message.
    """
    return _rewritten(chunk, _HAVE_NAMES, lambda raw: raw if _is_utf8(raw) else _hexadecimal(raw))


def _rewritten(chunk: Bytes, kinds: Collection[bytes], text: Callable[[bytes], bytes]) -> Bytes:
    parts: list[Bytes] = []
    done = 0
    for at, frame in each_frame(chunk):
        body = frame[XLOG_PAYLOAD_AT:].tobytes()
        if body[:1] not in kinds or body[5:].isascii():
            continue
        try:
            converted = _Message(body, text).converted()
        except (struct.error, IndexError, ValueError):
            raise TailraceError(
                Kind.PROTOCOL_VIOLATION,
                f"read the stream: a message of type {body[:1]!r} is malformed",
                REPORT_STREAM,
            ) from None
        if converted == body:
            continue
        head = struct.pack("!ci", b"d", XLOG_PAYLOAD_AT - 1 + len(converted)) + frame[5:XLOG_PAYLOAD_AT]
        parts += [chunk[done:at], np.frombuffer(head + converted, np.uint8)]
        done = at + len(frame)
    return np.concatenate([*parts, chunk[done:]]) if parts else chunk


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _hexadecimal(raw: bytes) -> bytes:
    return b"\\x" + raw.hex().encode()


def _name_of(match: re.Match[bytes]) -> bytes:
    return b'"' + bytes.fromhex(match[1].decode()).replace(b'"', b'""') + b'"'


def _utf8_of(session: Session, raw: bytes, encoding: str) -> bytes | None:
    return _convert(session, raw, encoding, "UTF8")


def _convert(session: Session, raw: bytes, encoding: str, to: str) -> bytes | None:
    """Return bytes in another encoding; None if they have no character in one of the encodings."""
    converted = f"convert('\\x{raw.hex()}'::bytea, '{encoding}', '{to}')"
    try:
        [row] = session.run(f"SELECT encode({converted}, 'hex') AS raw", "look up a character")
    except TailraceError as error:
        if error.context.get("sqlstate") not in UNCONVERTIBLE:
            raise
        return None
    return bytes.fromhex(row.text("raw"))
