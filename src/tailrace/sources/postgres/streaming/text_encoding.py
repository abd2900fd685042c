r"""Texts of a database whose encoding has bytes without a character: taken as they are, made UTF-8 here.

The server ends a command at the first text that it can't convert: one odd value would stop its table's
snapshot, and the stream for good. So of such a database texts are asked for in its own encoding. Each
character becomes what the server says of it, once; a text that has none for some of its bytes is given as
bytea writes them (`\x63616681`), as are texts of SQL_ASCII that are not UTF-8. The log has UTF-8 alone.

A database in UTF8, or in an encoding of which every byte is a character (LATIN1), is not touched by this.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Self

import numpy as np

from tailrace.errors import Kind, TailraceError
from tailrace.protocol.frames import XLOG_PAYLOAD_AT, Bytes, each_frame
from tailrace.sources.postgres.connection.errors import UNCONVERTIBLE
from tailrace.sources.postgres.connection.session import Session, quote_literal

#: Encodings that need nothing done here: decoding deals with SQL_ASCII, which nobody can convert.
_AS_THEY_ARE = ("UTF8", "SQL_ASCII")

#: Of EUC, behind 8E in EUC_TW come three bytes, behind 8F two; any other high byte begins a pair.
_EUC_TW = re.compile(rb"\x8e[\x80-\xff]{3}|[\x80-\xff]{1,2}")
_EUC = re.compile(rb"\x8f[\x80-\xff]{2}|[\x80-\xff]{1,2}")
_SINGLE_BYTE = re.compile(rb"[\x80-\xff]")

#: pgoutput's messages that have any: changes of rows, and what has names.
_HAVE_TEXTS = (b"I", b"U", b"D", b"R", b"Y", b"M", b"O")

_FIELD = re.compile(rb"[^\t\n]+")
_ESCAPE = re.compile(rb"\\(.)", re.DOTALL)
_ESCAPED = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}

#: What characters are in UTF-8, None for none, by version of the server and encoding. An encoding has some
#: ten thousand of them at most.
_known: dict[tuple[int, str], dict[bytes, bytes | None]] = {}


class _NoCharacterError(Exception):
    """Raised where bytes stand for no character."""


def own_encoding(session: Session) -> str | None:
    """Return the database's encoding if it has bytes that stand for no character; None if the server can
    give every text as UTF-8.

    :param session: in no transaction.
    """
    name = session.server_encoding
    if name in _AS_THEY_ARE:
        return None
    high = bytes(range(0x80, 0x100))
    return name if _utf8_of(session, high, name) is None else None


class TextEncoding:
    """Makes UTF-8 of texts in a database's own encoding. One thread.

    :param connect: opens a session for SQL; called when the first character is not known.
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
        """Return what makes UTF-8 of the texts of `session`'s database, None if the server does.

        :param session: in no transaction.
        """
        name = own_encoding(session)
        return None if name is None else cls(name, session.server_version, connect)

    def adopt(self, session: Session, command: str) -> bytes:
        """Have `session` send texts in the database's encoding from now on; return `command` in it."""
        attempted = "set client_encoding"
        raw = command.encode()
        if not raw.isascii():
            converted = f"convert_to({quote_literal(command)}, {quote_literal(self.name)})"
            [row] = session.run(f"SELECT encode({converted}, 'hex') AS raw", attempted)
            raw = bytes.fromhex(row["raw"] or "")
        session.run(f"SET client_encoding = {quote_literal(self.name)}", attempted)
        return raw

    def text(self, raw: bytes) -> bytes:
        """Return a text as UTF-8, or the hexadecimal form of its bytes.

        :raises TailraceError: as `Session.run`.
        """
        try:
            return self._converted(raw)
        except _NoCharacterError:
            return b"\\x" + raw.hex().encode()

    def rows(self, text: bytes) -> bytes:
        """Return whole lines in COPY's form, as UTF-8.

        :raises TailraceError: as `Session.run`.
        """
        try:
            return self._converted(text)  # nothing in it is part of a field and of what divides fields
        except _NoCharacterError:
            return _FIELD.sub(self._field, text)

    def changes(self, chunk: Bytes) -> Bytes:
        """Return whole frames of the stream, their texts as UTF-8; `chunk` itself if they were.

        :raises TailraceError: as `Session.run`; `PROTOCOL_VIOLATION` for a message that makes no sense.
        """
        parts: list[Bytes] = []
        done = 0
        for at, frame in each_frame(chunk):
            body = frame[XLOG_PAYLOAD_AT:].tobytes()
            if (
                body[:1] not in _HAVE_TEXTS
                or body[5:].isascii()
                or (converted := self._message(body)) == body
            ):
                continue
            head = struct.pack("!ci", b"d", XLOG_PAYLOAD_AT - 1 + len(converted)) + frame[5:XLOG_PAYLOAD_AT]
            parts += [chunk[done:at], np.frombuffer(head + converted, np.uint8)]
            done = at + len(frame)
        return np.concatenate([*parts, chunk[done:]]) if parts else chunk

    def close(self) -> None:
        """Close the session, if there is one."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _converted(self, raw: bytes) -> bytes:
        return raw if raw.isascii() else self._characters.sub(self._character, raw)

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
            return b"\\\\x" + value.hex().encode()

    def _message(self, body: bytes) -> bytes:
        """Return a pgoutput message with its texts as UTF-8."""
        try:
            return _Message(body, self.text).converted()
        except (struct.error, IndexError, ValueError):
            raise TailraceError(
                Kind.PROTOCOL_VIOLATION,
                f"read the stream: a message of type {body[:1]!r} is not what it says",
                "please report it with the server's version",
            ) from None


class _Message:
    """Copies a pgoutput message (protocol version 1) and converts its texts on the way."""

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
                self._copy(1)  # what tuple it is
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


def _utf8_of(session: Session, raw: bytes, encoding: str) -> bytes | None:
    converted = f"convert('\\x{raw.hex()}'::bytea, {quote_literal(encoding)}, 'UTF8')"
    try:
        [row] = session.run(f"SELECT encode({converted}, 'hex') AS utf8", "look up a character")
    except TailraceError as error:
        if error.context.get("sqlstate") not in UNCONVERTIBLE:
            raise
        return None
    return bytes.fromhex(row["utf8"] or "")
