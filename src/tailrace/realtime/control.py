"""Files of a log for the real-time path of each consumer: commands from any process, and the path's state."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tailrace.changelog.directory import LogDirectory, encode_name

_FOLDER = "realtime"


@dataclass(frozen=True, slots=True)
class SwitchCommand:
    """The user's last command, and its time (since 1970)."""

    on: bool
    time_us: int


@dataclass(frozen=True, slots=True)
class KeptState:
    """A consumer's stored state: whether it may be on, its position, and whether a fall-back switched it off.

    :param command_us: time of the last command that was known then; 0: there was none.
    """

    is_on: bool = False
    position: int = 0
    fell_back: bool = False
    command_us: int = 0

    def waits_for_command(self, last: SwitchCommand | None) -> bool:
        """Return whether the consumer fell back, and there was no command since."""
        return self.fell_back and self.command_us == (0 if last is None else last.time_us)


def give_command(directory: LogDirectory, consumer: str, *, on: bool) -> None:
    """Store a command to feed a consumer from memory, or not to; it applies until the next command.

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
    """Store a consumer's state, durably.

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
    """Return a consumer's state as it was last stored.

    :raises TailraceError: `LOG_CORRUPT`.
    """
    found = directory.state_read(_name(consumer, "state"))
    if found is None:
        return KeptState()
    on, fell_back = bool(found["on"]), bool(found["fell_back"])
    return KeptState(on, int(found["log_offset"]), fell_back, int(found.get("command_us", 0)))


def _name(consumer: str, what: str) -> str:
    return f"{_FOLDER}/{encode_name(consumer)}.{what}"
