"""Kafka's wire protocol, as far as a proxy needs it to answer in a broker's place.

Only requests of a transactional producer. An answer is made from its request alone, with one error code
in it; brokers' messages are not read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

PRODUCE, FIND_COORDINATOR, INIT_PRODUCER_ID, ADD_PARTITIONS, END_TXN = 0, 10, 22, 24, 26

NAMES = {
    "Produce": PRODUCE,
    "FindCoordinator": FIND_COORDINATOR,
    "InitProducerId": INIT_PRODUCER_ID,
    "AddPartitionsToTxn": ADD_PARTITIONS,
    "EndTxn": END_TXN,
}

#: First version of each request with compact lengths and tags, and the last version known here.
_FLEXIBLE = {PRODUCE: 9, FIND_COORDINATOR: 3, INIT_PRODUCER_ID: 2, ADD_PARTITIONS: 3, END_TXN: 3}
_LAST = {PRODUCE: 11, FIND_COORDINATOR: 2, INIT_PRODUCER_ID: 5, ADD_PARTITIONS: 3, END_TXN: 4}

_Topics = list[tuple[str, list[int]]]


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `body` is what follows the header.

    :param commits: whether it commits a transaction.
    """

    key: int
    version: int
    correlation: int
    body: bytes

    @property
    def flexible(self) -> bool:
        """Whether lengths are compact and tags follow."""
        return self.version >= _FLEXIBLE.get(self.key, 1 << 16)

    @property
    def commits(self) -> bool:
        """Whether it ends a transaction with a commit."""
        if self.key != END_TXN:
            return False
        reader = _Reader(self.body, self.flexible)
        reader.text()
        reader.number("!qh")
        return bool(reader.number("!b"))

    @property
    def is_of_a_group(self) -> bool:
        """Whether it looks for the coordinator of a group, as every consumer does, not of a transaction."""
        return self.key == FIND_COORDINATOR and (self.version == 0 or self.body[-1] == 0)


def request(frame: bytes) -> Request:
    """Parse a client's frame, without its length."""
    key, version, correlation, size = struct.unpack_from("!hhih", frame)
    at = 10 + max(size, 0)
    if version >= _FLEXIBLE.get(key, 1 << 16):
        at += 1  # clients never send tags in a request's header
    return Request(key, version, correlation, frame[at:])


def answer(asked: Request, error: int) -> bytes:
    """Return the frame, without its length, that a broker would answer with for `error`.

    :raises ValueError: for a request or version that is not known here.
    """
    if asked.version > _LAST.get(asked.key, -1):
        raise ValueError(f"request {asked.key} of version {asked.version} is not known here")
    writer = _Writer(asked.flexible)
    writer.number("!i", asked.correlation)
    writer.tags()
    if asked.key == PRODUCE:
        _produce(writer, asked, error)
    elif asked.key == ADD_PARTITIONS:
        _add_partitions(writer, asked, error)
    else:
        writer.number("!ih", 0, error)
        if asked.key == INIT_PRODUCER_ID:
            writer.number("!qh", -1, -1)
        elif asked.key == FIND_COORDINATOR:
            writer.number("!hihi", -1, -1, 0, -1)  # null message, no node, no host, no port
    writer.tags()
    return bytes(writer.out)


def _produce(writer: _Writer, asked: Request, error: int) -> None:
    topics = _produced(asked)
    writer.length(len(topics))
    for name, partitions in topics:
        writer.text(name)
        writer.length(len(partitions))
        for partition in partitions:
            writer.number("!ihqqq", partition, error, -1, -1, -1)
            if asked.version >= 8:
                writer.length(0)
                writer.nothing()
            writer.tags()
        writer.tags()
    writer.number("!i", 0)


def _add_partitions(writer: _Writer, asked: Request, error: int) -> None:
    reader = _Reader(asked.body, asked.flexible)
    reader.text()
    reader.number("!qh")
    topics = []
    for _ in reader.items():
        topics.append((reader.text(), [int(reader.number("!i")) for _ in reader.items()]))
        reader.tags()
    writer.number("!i", 0)
    writer.length(len(topics))
    for name, partitions in topics:
        writer.text(name)
        writer.length(len(partitions))
        for partition in partitions:
            writer.number("!ih", partition, error)
            writer.tags()
        writer.tags()


def _produced(asked: Request) -> _Topics:
    reader = _Reader(asked.body, asked.flexible)
    reader.text()
    reader.number("!hi")
    topics: _Topics = []
    for _ in reader.items():
        name, partitions = reader.text(), []
        for _ in reader.items():
            partitions.append(int(reader.number("!i")))
            reader.skip_bytes()
            reader.tags()
        reader.tags()
        topics.append((name, partitions))
    return topics


class _Reader:
    def __init__(self, body: bytes, flexible: bool) -> None:
        self._body, self._flexible, self._at = body, flexible, 0

    def number(self, form: str) -> int:
        """Return the last of the numbers in `form`."""
        found = struct.unpack_from(form, self._body, self._at)
        self._at += struct.calcsize(form)
        return int(found[-1])

    def text(self) -> str:
        size = self._compact() - 1 if self._flexible else self.number("!h")
        found = self._body[self._at : self._at + max(size, 0)]
        self._at += max(size, 0)
        return found.decode()

    def skip_bytes(self) -> None:
        size = self._length()
        self._at += max(size, 0)

    def items(self) -> Iterator[int]:
        return iter(range(self._length()))

    def tags(self) -> None:
        if self._flexible:
            for _ in range(self._compact()):
                self._compact()
                size = self._compact()
                self._at += size

    def _length(self) -> int:
        return self._compact() - 1 if self._flexible else self.number("!i")

    def _compact(self) -> int:
        value = shift = 0
        while True:
            byte = self._body[self._at]
            self._at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7


class _Writer:
    def __init__(self, flexible: bool) -> None:
        self._flexible, self.out = flexible, bytearray()

    def number(self, form: str, *values: int) -> None:
        self.out += struct.pack(form, *values)

    def text(self, value: str) -> None:
        raw = value.encode()
        if self._flexible:
            self._compact(len(raw) + 1)
        else:
            self.number("!h", len(raw))
        self.out += raw

    def nothing(self) -> None:
        """Write a null text."""
        self.out += b"\0" if self._flexible else b"\xff\xff"

    def length(self, count: int) -> None:
        if self._flexible:
            self._compact(count + 1)
        else:
            self.number("!i", count)

    def tags(self) -> None:
        if self._flexible:
            self.out += b"\0"

    def _compact(self, value: int) -> None:
        while value > 0x7F:
            self.out.append(value & 0x7F | 0x80)
            value >>= 7
        self.out.append(value)
