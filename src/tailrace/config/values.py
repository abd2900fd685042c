"""Debezium's handling modes: settings for the form of values of some types.

The log has PostgreSQL's text in every mode, so a replay with another mode gives the same changes
in another form.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field, field_validator

from tailrace.config.fields import Section
from tailrace.model import OWN_FORMS, ValueModes

#: The values of the modes. Their options have Debezium's names, with underscores.
Decimal = Literal["precise", "double", "string"]
Time = Literal[
    "adaptive", "adaptive_time_microseconds", "connect", "isostring", "microseconds", "nanoseconds"
]
Interval = Literal["numeric", "string"]
Binary = Literal["bytes", "base64", "base64-url-safe", "hex"]
Hstore = Literal["json", "map"]

_SEE = "Not set: Tailrace's own form. See [types](types.md)."


class HandlingModes(Section):
    """The handling modes, for rows of any kind."""

    decimal_handling_mode: Decimal | None = Field(
        default=None, description=f"`numeric` and `money`: exact bytes, numbers or text. {_SEE}"
    )
    time_precision_mode: Time | None = Field(
        default=None, description=f"`date`, `time`, `timetz` and `timestamp`: numbers or ISO 8601. {_SEE}"
    )
    interval_handling_mode: Interval | None = Field(
        default=None, description=f"`interval`: microseconds, 30.4375 days per month, or ISO 8601. {_SEE}"
    )
    binary_handling_mode: Binary | None = Field(default=None, description=f"`bytea`: bytes or text. {_SEE}")
    hstore_handling_mode: Hstore | None = Field(
        default=None, description=f"`hstore`: a JSON document or a map. {_SEE}"
    )
    money_fraction_digits: int = Field(
        default=2,
        ge=0,
        le=10,
        description="Digits after the point that `money` gets under a `decimal_handling_mode`.",
    )

    @property
    def value_modes(self) -> ValueModes:
        """The modes in the form that decoding uses."""
        return ValueModes(
            decimal=self.decimal_handling_mode,
            time=self.time_precision_mode,
            interval=self.interval_handling_mode,
            binary=self.binary_handling_mode,
            hstore=self.hstore_handling_mode,
            money_fraction_digits=self.money_fraction_digits,
        )


class ValueHandling(HandlingModes):
    """The handling modes of a source, and the placeholder that only JSON has."""

    unavailable_value_placeholder: str = Field(
        default=OWN_FORMS.unavailable_placeholder,
        min_length=1,
        max_length=1000,
        description="Text in JSON for a value that was not sent (unchanged TOAST).",
    )

    @field_validator("unavailable_value_placeholder")
    @classmethod
    def _is_text(cls, value: str) -> str:
        if value.startswith("hex:"):
            raise ValueError("hex: is not read any more: write the text itself")
        return value

    @property
    def value_modes(self) -> ValueModes:
        """The modes in the form that decoding uses."""
        return replace(super().value_modes, unavailable_placeholder=self.unavailable_value_placeholder)
