"""State machines as tables that map a state and an event to the next state. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, TypeVar

S = TypeVar("S", bound=enum.Enum)
E = TypeVar("E", bound=enum.Enum)
Found = TypeVar("Found")

#: Number of newest steps that a machine keeps, to explain an error.
STEPS_MAX = 20


@dataclass(frozen=True, slots=True)
class StateMachine(Generic[S, E]):
    """A state and the newest steps that led to it. A subclass has the table and a start state."""

    state: S
    steps: tuple[tuple[S, E], ...] = ()

    def found(self, table: Mapping[tuple[S, E], Found], event: E) -> Found:
        """Return the table's entry for this state and `event`.

        :raises IllegalTransition: the table has no such entry.
        """
        if (self.state, event) not in table:
            raise IllegalTransition(type(self).__name__, self.state, event, self.story)
        return table[self.state, event]

    def moved(self, event: E, state: S, **changes: Any) -> Self:
        """Return the machine after `event`, in `state`; `changes` are new values of its other fields."""
        return replace(self, state=state, steps=(*self.steps, (self.state, event))[-STEPS_MAX:], **changes)

    @property
    def story(self) -> str:
        """The newest steps and the state, as text: `NEW (start) → FENCING`."""
        return "".join(f"{state.name} ({event.value}) → " for state, event in self.steps) + self.state.name


class IllegalTransition(RuntimeError):  # noqa: N818 - it is named after what happened
    """An event that the table does not allow in this state. Pickles."""

    def __init__(self, machine: str, state: enum.Enum, event: enum.Enum, story: str) -> None:
        super().__init__(machine, state, event, story)

    def __str__(self) -> str:
        machine, state, event, story = self.args
        return f"{machine} is {state.value!r}: {event.value!r} is not allowed here; its story: {story}"
