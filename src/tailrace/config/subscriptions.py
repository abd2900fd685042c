"""The section `subscriptions`: how changes are served to other processes."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from tailrace.config.fields import Section
from tailrace.secrets import Secret

#: Where the token is looked for if nothing else is said.
TOKEN = Secret("${env:TAILRACE_TOKEN}")


def _origin(value: str) -> str:
    if not re.fullmatch(r"https?://[^/?#@\s*]+", value):
        raise ValueError(
            "must be scheme and host, with a port if it is not the scheme's: http://localhost:3000"
        )
    return value.lower()


class SubscriptionsConfig(Section):
    """Changes for other processes, over HTTP on this machine."""

    port: Annotated[int, Field(ge=0, le=65_535)] = Field(
        default=8765, description="Port on 127.0.0.1; 0: any that is free; it is logged."
    )
    token: Secret = Field(
        default=TOKEN,
        description="What every client has to send; a reference, `${env:NAME}` or `${file:/path}`. "
        "Default: `${env:TAILRACE_TOKEN}`.",
    )
    origins: tuple[Annotated[str, AfterValidator(_origin)], ...] = Field(
        default=(),
        description="Web sites whose pages may subscribe, as `http://localhost:3000`. Other programs than "
        "browsers need none.",
    )
    subscribers_max: Annotated[int, Field(ge=1, le=100_000)] = Field(
        default=1000, description="Most subscribers at a time."
    )
