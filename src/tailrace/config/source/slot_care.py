"""The sections `source.heartbeat` and `source.slot_watch`: how the replication slot is looked after."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from tailrace.config.fields import MIB, ByteCount, Section


class HeartbeatConfig(Section):
    """How the slot's position follows the server while nothing comes for this pipeline."""

    interval_s: float = Field(
        default=10.0,
        gt=0,
        le=3600,
        description="Seconds after which the acknowledged position follows an idle server, and from one "
        "`action` or `query` to the next.",
    )
    action: Literal["keepalive", "message", "transaction"] = Field(
        default="keepalive",
        description="`keepalive`: the server's own keepalives are acknowledged, nothing is written; "
        "`message`: also write a logical message (`pg_logical_emit_message`) outside transactions; "
        "`transaction`: as `message`, in a transaction. A standby can't write: there it is `keepalive`.",
    )
    query: str | None = Field(
        default=None,
        min_length=1,
        max_length=10_000,
        description="SQL to run instead of `action`, such as an `UPDATE` of a table of your own. Names in it "
        "need their schema. Tables that are captured can't be written to. That it changes no row is a "
        "warning.",
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if self.query is not None and self.action != "keepalive":
            raise ValueError("action and query exclude each other: take one of them out")
        return self

    @property
    def writes(self) -> bool:
        """Whether a heartbeat does anything at the source."""
        return self.query is not None or self.action != "keepalive"


class SlotWatchConfig(Section):
    """What is asked about the slot while the pipeline runs, and when it is worth a warning."""

    interval_s: float = Field(
        default=10.0,
        ge=0,
        le=3600,
        description="Seconds from one look at the slot to the next, on a connection of its own; 0: never.",
    )
    retained_bytes_warned: ByteCount = Field(
        default=8192 * MIB,
        ge=MIB,
        description="Warn when the server keeps more WAL than this for the slot.",
    )
    safe_wal_share_warned: float = Field(
        default=0.3,
        ge=0,
        le=1,
        description="Warn when less than this share of `max_slot_wal_keep_size` is left before the server "
        "gives the slot up.",
    )
    transaction_age_warned_s: float = Field(
        default=300.0,
        ge=0,
        description="Warn of transactions older than this many seconds that keep WAL from being removed.",
    )
