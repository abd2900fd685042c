"""The section `realtime`: handlers and sinks that are fed from memory while they keep up."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from tailrace.config.fields import ByteCount, Section


class RealtimeConfig(Section):
    """Whether a consumer is fed from memory, and what happens when it can't keep up."""

    enabled: bool = Field(
        default=False,
        description="Whether real time is on. What `tailrace realtime` has said comes before this.",
    )
    buffer_bytes: Annotated[ByteCount, Field(ge=64 * 1024)] | None = Field(
        default=None,
        description="Most bytes of changes that wait in memory; beyond it a consumer is fed from the log. "
        "Default: twice `log.segment_bytes`.",
    )
    return_automatically: bool = Field(
        default=False,
        description="After such a fall-back, begin again by itself: after a second, then after twice as long "
        "each time, at most a minute. `false`: wait for `tailrace realtime on`.",
    )


def _from_switch(value: Any) -> Any:
    return {"enabled": value} if isinstance(value, bool) else value


#: The section, or `on` or `off` in its place.
RealtimeSection = Annotated[RealtimeConfig, BeforeValidator(_from_switch)]
