"""Output of the command line: results go to standard output, log lines and errors to standard error.

An error is printed as one block of text, with a trace only if `--debug` is set. Exit status: 0
done, 1 failed, 2 bad usage or configuration.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import inspect
import io
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, MutableMapping
from contextvars import ContextVar
from typing import Any

import typer

from tailrace.cli.parameters import Debug, Verbose
from tailrace.errors import Kind, TailraceError, printable

DONE, FAILED, UNUSABLE = 0, 1, 2

#: Kinds of errors in usage or configuration, as opposed to failures of the command.
_UNUSABLE_KINDS = frozenset({Kind.CONFIG_INVALID, Kind.SECRET_MISSING})

#: (verbose, debug) as given before the command: `tailrace -v run` has the same effect as `tailrace run -v`.
_at_root: ContextVar[tuple[bool, bool]] = ContextVar("at_root", default=(False, False))


def note_root_options(*, verbose: bool, debug: bool) -> None:
    """Store the options that were given before the command's name."""
    _at_root.set((verbose, debug))


def exit_status(error: TailraceError) -> int:
    """Return the exit status for `error`."""
    return UNUSABLE if error.kind in _UNUSABLE_KINDS else FAILED


@contextlib.contextmanager
def conversation(
    *, verbose: bool = False, debug: bool = False, as_json: bool = False, chatty: bool = False
) -> Iterator[None]:
    """Set up logging; print an error that the body raises, and end the process with its exit status.

    :param as_json: the command prints JSON, so an error is a JSON document too.
    :param chatty: log the engine's activity, not only warnings and errors.
    """
    at_root = _at_root.get()
    verbose, debug = verbose or at_root[0], debug or at_root[1]
    configure_logs("debug" if verbose else "info" if chatty else "warning")
    if as_json and isinstance(sys.stdout, io.TextIOWrapper):
        # In another encoding than that of JSON, `backslashreplace` would write what JSON does not have.
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        yield
    except TailraceError as error:
        fail(error, debug=debug, as_json=as_json)
    except BrokenPipeError:
        # The reader has closed the pipe, as with `| head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(DONE) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:  # noqa: BLE001 - every error is printed as text, not as a trace
        from tailrace.pipeline.background import as_failure

        fail(as_failure(error, Kind.ENVIRONMENT_UNFIT), debug=debug, as_json=as_json)


def speaking(*, chatty: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds `--verbose` and `--debug` to a command and runs it in a `conversation`.

    If the command has `as_json`, its errors are JSON, too; after JSON Lines the error is the last line.
    """

    def make(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        has_json = "as_json" in own.parameters

        @functools.wraps(command)
        def spoken(*, verbose: bool = False, debug: bool = False, **values: Any) -> None:
            as_json = has_json and values["as_json"]
            with conversation(verbose=verbose, debug=debug, as_json=as_json, chatty=chatty):
                command(**values)

        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
            for name, kind in (("verbose", Verbose), ("debug", Debug))
        ]
        signature = own.replace(parameters=[*own.parameters.values(), *more])
        spoken.__signature__ = signature  # type: ignore[attr-defined]
        spoken.__annotations__ = {each.name: each.annotation for each in signature.parameters.values()}
        return spoken

    return make


def fail(error: TailraceError, *, debug: bool = False, as_json: bool = False) -> None:
    """Print `error` and end the process with its exit status."""
    from tailrace.secrets import redact

    if debug:
        _to_standard_error(redact(traceback.format_exc()))
    if as_json:
        with contextlib.suppress(OSError):  # `error` may itself be a failed write to standard output
            print_json({"error": error.as_json()})
    _to_standard_error(redact(block(error)))
    raise typer.Exit(exit_status(error))


def block(error: TailraceError) -> str:
    """Return `error` as text: kind, message, context, hint."""
    # Only problems of the file may have several lines; elsewhere a name with a newline could forge one.
    lines_of_message = error.message.split("\n") if error.kind is Kind.CONFIG_INVALID else [error.message]
    message, *more = map(printable, lines_of_message)
    lines = [f"error: {error.kind}: {message}", *more]
    shown = {name: value for name, value in error.context.items() if value not in ("", None)}
    if shown:
        lines.append(
            "  at:   " + ", ".join(f"{name}={printable(str(value))}" for name, value in shown.items())
        )
    if error.hint:
        lines.append("  hint: " + printable(error.hint))
    return "\n".join(lines) + "\n"


def error_lines(error: dict[str, Any], indent: str) -> list[str]:
    """Return an error's JSON as lines of text, each with `indent` before it."""
    lines = [f"{indent}error: {error['kind']}: {printable(str(error['message']))}"]
    if error.get("hint"):
        lines.append(f"{indent}hint:  {printable(str(error['hint']))}")
    return lines


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON document and a newline to standard output."""
    sys.stdout.write(json.dumps(document, ensure_ascii=False, default=str) + "\n")
    sys.stdout.flush()


def configure_logs(level: str) -> None:
    """Send log lines of `level` (debug, info, warning) and above to standard error.

    A line has the time, the level, the escaped event, and names with the `repr` of values, so a table's name
    can't forge a line or control a terminal. Secrets that this process has resolved are removed.
    """
    import structlog

    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            _line,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *_: _StandardError(),
        cache_logger_on_first_use=False,
    )


def _to_standard_error(text: str) -> None:
    """Write to the current `sys.stderr`, which the live display may have replaced. A text that can't be
    written, because a disk is full or the terminal was closed, must not end the work that it is about.
    """
    with contextlib.suppress(OSError):
        sys.stderr.write(text)


class _StandardError:
    """Writes log lines."""

    def msg(self, message: str) -> None:
        _to_standard_error(message + "\n")

    debug = info = warning = warn = error = critical = exception = fatal = log = msg


def _line(_logger: object, name: str, event: MutableMapping[str, Any]) -> str:
    time = dt.datetime.now(dt.UTC).strftime("%H:%M:%S.%f")[:-3]
    trace = event.pop("exception", "")
    words = [time, f"{event.pop('level', name):<7}", printable(str(event.pop("event", "")))]
    words += [f"{key}={value!r}" for key, value in event.items()]
    from tailrace.secrets import redact

    return redact(" ".join(words) + (f"\n{trace}" if trace else ""))
