"""`tailrace serve`: subscriptions to a log, beside whatever writes it."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from typing import Any

from pydantic import ValidationError

from tailrace import config
from tailrace.changelog.directory import LogDirectory
from tailrace.cli.run import stop_on_signals
from tailrace.config.subscriptions import SubscriptionsConfig
from tailrace.errors import Kind, TailraceError
from tailrace.subscriptions.served_log import LogPlace, places_in, places_of
from tailrace.subscriptions.server import serving


def serve_changes(path: Path, port: int | None, token: str | None, origins: list[str]) -> None:
    """Serve the changes of the log at `path`, or of a pipeline's file, until a signal.

    What is given goes before what the file says.

    :raises TailraceError: `CONFIG_INVALID`, `LOG_MISSING`; as `serving`.
    """
    places, settings = _of(path)
    given: dict[str, Any] = {"port": port, "token": token, "origins": tuple(origins) or None}
    changed = {name: value for name, value in given.items() if value is not None}
    try:
        settings = SubscriptionsConfig.model_validate(settings.model_dump(exclude_unset=True) | changed)
    except ValidationError as error:
        first = error.errors()[0]
        raise TailraceError(
            Kind.CONFIG_INVALID, f"serve with --{str(first['loc'][0]).removesuffix('s')}: {first['msg']}"
        ) from None
    stop = Event()
    stop_on_signals(stop.set)
    with serving(places, settings):
        stop.wait()


def _of(path: Path) -> tuple[tuple[LogPlace, ...], SubscriptionsConfig]:
    if path.is_file():
        loaded = config.load_engine(path)
        return places_of(loaded), loaded.subscriptions or SubscriptionsConfig()
    if not path.is_dir():
        LogDirectory.open(path)  # says what is missing
    return places_in(path), SubscriptionsConfig()
