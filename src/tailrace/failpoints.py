"""Named places where a test can make the process die, fail or wait.

While no failpoint is armed, one costs two checks of variables. The environment variable
`TAILRACE_FAILPOINTS` arms failpoints: a comma-separated list of `name=action[@count]`. The action
is taken when the point is reached for the `count`-th time (from 1, the default).

Actions: `kill` (SIGKILL to this process: no clean-up of any kind runs), `error` (raises
`FailpointError`), `enospc` and `eio` (raise the `OSError`), `sleep:<milliseconds>`.

`TAILRACE_FAILPOINTS_LOG` names a file to which every hit, armed or not, appends its name. With it
a test asserts that each point of `NAMES` was reached.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time

#: All failpoints. `hit` refuses other names, so this list is complete.
NAMES: frozenset[str] = frozenset(
    {
        "capture.before_append",
        "capture.after_append",
        "log.before_fsync",
        "log.after_fsync",
        "log.before_roll",
        "log.after_seal",
        "log.after_roll",
        "log.recovery",
        "capture.before_acknowledge",
        "capture.after_acknowledge",
        "snapshot.after_slot",
        "snapshot.after_plan",
        "snapshot.in_copy",
        "snapshot.before_chunk_end",
        "snapshot.after_chunk",
        "snapshot.before_window",
        "snapshot.in_window",
        "snapshot.after_window",
        "snapshot.before_finish",
        "snapshot.before_handover",
        "snapshot.after_handover",
        "sink.before_write",
        "sink.in_task",
        "sink.after_write",
        "sink.before_commit",
        "sink.after_commit",
        "sink.after_publish",
        "sink.before_remove",
        "sink.before_position",
        "sink.after_position",
        "kafka.after_begin",
        "kafka.in_batch",
        "kafka.before_offset",
        "kafka.before_commit",
        "kafka.after_commit",
        "kafka.after_head",
        "kafka.after_fence",
        "kafka.in_share",
        "kafka.after_refusal",
        "log.before_retention",
        "log.in_retention",
        "log.after_retention",
        "engine.after_poll",
        "engine.before_commit",
        "engine.after_commit",
        "engine.before_stop",
        "realtime.before_keep",
        "realtime.after_keep",
        "realtime.before_fill",
        "realtime.before_mark_start",
        "realtime.start_durable",
        "realtime.before_work",
        "realtime.before_mark_handled",
        "realtime.handled_durable",
        "realtime.before_drop",
        "realtime.before_end_work",
        "realtime.before_mark_stop",
        "realtime.stop_durable",
        "vitess.after_discard",
    }
)


class FailpointError(RuntimeError):
    """Raised by the action `error`."""


_lock = threading.Lock()
_counts: dict[str, int] = {}
_log_path = os.environ.get("TAILRACE_FAILPOINTS_LOG", "")


def _parse(text: str) -> dict[str, tuple[str, int]]:
    armed: dict[str, tuple[str, int]] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, rest = item.partition("=")
        action, _, count = rest.partition("@")
        if name not in NAMES:
            raise ValueError(f"TAILRACE_FAILPOINTS names {name!r}, which is not a failpoint")
        armed[name] = (action, int(count or "1"))
    return armed


_armed = _parse(os.environ.get("TAILRACE_FAILPOINTS", ""))


def arm(text: str) -> None:
    """Arm failpoints in this process, replacing those armed before; `""` disarms all."""
    with _lock:
        _armed.clear()
        _armed.update(_parse(text))
        _counts.clear()


def hit(name: str) -> None:
    """Record that the code has reached `name`; take its action if it is armed."""
    if not _armed and not _log_path:
        return
    if name not in NAMES:
        raise ValueError(f"{name!r} is not in failpoints.NAMES")
    if _log_path:
        with open(_log_path, "a", encoding="ascii") as log:
            log.write(name + "\n")
    with _lock:
        if name not in _armed:
            return
        action, wanted = _armed[name]
        _counts[name] = count = _counts.get(name, 0) + 1
    if count == wanted:
        _act(name, action)


def _act(name: str, action: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "error":
        raise FailpointError(f"failpoint {name}")
    elif action in ("enospc", "eio"):
        number = errno.ENOSPC if action == "enospc" else errno.EIO
        raise OSError(number, os.strerror(number), f"failpoint {name}")
    elif action.startswith("sleep:"):
        time.sleep(int(action.removeprefix("sleep:")) / 1000)
    else:
        raise ValueError(f"failpoint {name}: unknown action {action!r}")
