"""`run`, `replay` and `serve`: commands that run in the foreground until they are done or get a signal."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Any

from pydantic import ValidationError

from tailrace import config
from tailrace.changelog.directory import LogDirectory
from tailrace.config import EngineConfig
from tailrace.config.fields import local_path
from tailrace.config.problems import from_pydantic
from tailrace.config.sections import SubscriptionsConfig
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline.replay import Replay, choose_sink, require_not_fed
from tailrace.pipeline.run import Run
from tailrace.pipeline.status.display import ProgressDisplay
from tailrace.ranges.positions import parse_point


def run_pipeline(file: Path, *, until_caught_up: bool) -> None:
    """Run the pipeline of `file` until it has caught up or gets a signal.

    :raises TailraceError: the error that ended it.
    """
    pipeline = config.load_engine(file)
    with ProgressDisplay() as progress:
        run = Run(pipeline, until_caught_up=until_caught_up, observe=progress.turn)
        _stop_on_signals(run.stop)
        with _served(pipeline):
            run.run()


def replay_sink(file: Path, source: str | None, sink: str, begin: str | None, into: str | None) -> None:
    """Deliver the log of `source` (None: the only one) to one sink of `file` again.

    :raises TailraceError: `CONFIG_INVALID` for an unknown sink, or an invalid `begin` or `into`; as
            `Replay.run`.
    """
    loaded = config.load_engine(file)
    pipeline = loaded.pipeline(source)
    try:
        point = None if begin is None else parse_point(begin)
    except ValueError as error:
        raise TailraceError(Kind.CONFIG_INVALID, f"read --from: {error}") from None
    chosen = choose_sink(pipeline, sink)
    require_not_fed(loaded, pipeline, chosen)
    try:
        target = None if into is None else local_path(into, Path.cwd())
    except ValueError as error:
        raise TailraceError(Kind.CONFIG_INVALID, f"read --into: it {error}") from None
    with ProgressDisplay() as progress:
        replay = Replay(pipeline, chosen, begin=point, into=target, observe=progress.turn)
        _stop_on_signals(replay.stop)
        replay.run()
    print(replay.summary())


@contextlib.contextmanager
def _served(pipeline: EngineConfig) -> Iterator[None]:
    """Serve subscriptions while the body runs, if the file has the section `subscriptions`."""
    if pipeline.subscriptions is None:
        yield
        return
    from tailrace.subscriptions.served_log import places_of
    from tailrace.subscriptions.server import serving

    with serving(places_of(pipeline), pipeline.subscriptions):
        yield


def serve_changes(path: Path, port: int | None, token: str | None, origins: list[str]) -> None:
    """Serve the changes of the log at `path`, or of a pipeline's file, until a signal.

    The other arguments override the file's settings; None or empty: not given.

    :raises TailraceError: `CONFIG_INVALID`, `LOG_MISSING`; as `serving`.
    """
    from tailrace.subscriptions.served_log import places_in, places_of
    from tailrace.subscriptions.server import serving

    if path.is_file():
        loaded = config.load_engine(path)
        places, settings = places_of(loaded), loaded.subscriptions or SubscriptionsConfig()
    else:
        if not path.is_dir():
            LogDirectory.open(path)  # raises an error that says what is missing
        places, settings = places_in(path), SubscriptionsConfig()
    given: dict[str, Any] = {"port": port, "token": token, "origins": tuple(origins) or None}
    changed = {name: value for name, value in given.items() if value is not None}
    try:
        settings = SubscriptionsConfig.model_validate(settings.model_dump(exclude_unset=True) | changed)
    except ValidationError as error:
        first = from_pydantic(error, SubscriptionsConfig, ())[0]
        raise TailraceError(
            Kind.CONFIG_INVALID, f"serve with --{str(first.path[0]).removesuffix('s')}: {first.message}"
        ) from None
    stop = Event()
    _stop_on_signals(stop.set)
    with serving(places, settings):
        stop.wait()


def _stop_on_signals(stop: Callable[[], None]) -> None:
    """Make the first SIGINT or SIGTERM call `stop`, and the second end the process."""
    asked = False

    def on_signal(number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            # At once, without clean-up: the log and the sinks recover from it at the next start.
            os._exit(128 + number)
        asked = True
        # Not through sys.stderr: the signal may have interrupted a write to it.
        with contextlib.suppress(OSError):
            os.write(2, b"stopping; a second signal ends at once\n")
        stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
