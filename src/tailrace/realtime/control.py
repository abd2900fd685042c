"""What a log keeps of the real-time path of each consumer: commands from any process, and its own state."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tailrace.changelog.directory import LogDirectory, encode_name

_FOLDER = "realtime"


@dataclass(frozen=True, slots=True)
class SwitchCommand:
    """What somebody has said last, and when (since 1970)."""

    on: bool
    time_us: int


@dataclass(frozen=True, slots=True)
class KeptState:
    """What a consumer has kept: whether it may be on, where it was, and whether it is off as it fell back.

    :param command_us: when the command was given that it knew then; 0: there was none.
    """

    is_on: bool = False
    position: int = 0
    fell_back: bool = False
    command_us: int = 0

    def waits_for_command(self, last: SwitchCommand | None) -> bool:
        """Return whether it fell back, and nobody has said anything since."""
        return self.fell_back and self.command_us == (0 if last is None else last.time_us)


def give_command(directory: LogDirectory, consumer: str, *, on: bool) -> None:
    """Say that a consumer is to be fed from memory, or no more; stands until the next command.

    :raises TailraceError: `LOG_FULL`, `LOG_WRITE_FAILED`.
    """
    directory.state_write(_name(consumer, "command"), {"on": on, "time_us": time.time_ns() // 1000})


def command(directory: LogDirectory, consumer: str) -> SwitchCommand | None:
    """Return the last command; None: there was none.

    :raises TailraceError: `LOG_CORRUPT`.
    """
    found = directory.state_read(_name(consumer, "command"))
    return None if found is None else SwitchCommand(bool(found["on"]), int(found["time_us"]))


def keep(directory: LogDirectory, consumer: str, state: KeptState) -> None:
    """Keep a consumer's state, durably.

    :raises TailraceError: `LOG_FULL`, `LOG_WRITE_FAILED`.
    """
    content = {
        "on": state.is_on,
        "log_offset": state.position,
        "fell_back": state.fell_back,
        "command_us": state.command_us,
    }
    directory.state_write(_name(consumer, "state"), content)


def kept(directory: LogDirectory, consumer: str) -> KeptState:
    """Return what a consumer has kept last.

    :raises TailraceError: `LOG_CORRUPT`.
    """
    found = directory.state_read(_name(consumer, "state"))
    if found is None:
        return KeptState()
    on, fell_back = bool(found["on"]), bool(found["fell_back"])
    return KeptState(on, int(found["log_offset"]), fell_back, int(found.get("command_us", 0)))


def _name(consumer: str, what: str) -> str:
    return f"{_FOLDER}/{encode_name(consumer)}.{what}"
