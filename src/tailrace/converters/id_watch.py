"""A watch over the ids that a schema registry gave: a registry can lose its schemas.

One that was emptied, or restored from a backup, gives their ids to other schemas, and readers would take
records for something else. Ids rise, so a registry that has the highest one for its schema has the others.
"""

from __future__ import annotations

import threading
import time

from tailrace.config.converters import RegistryOptions
from tailrace.converters.registry import Registry, is_missing
from tailrace.errors import Kind, TailraceError

#: Interval at which the highest id is looked up, in seconds.
CHECK_S = 1.0
#: Longest wait for the answer, in milliseconds.
_TIMEOUT_MS = 1000
#: The wait after a slow answer, or none, as a multiple of the time that it took.
_REST = 30


class IdWatch:
    """Checks, at most once a second, that a registry still has the highest id that it gave.

    A registry that does not answer is not waited for: known ids are used meanwhile. Any thread.
    """

    def __init__(self, options: RegistryOptions, kind: str) -> None:
        timeout_ms = min(options.registry_timeout_ms, _TIMEOUT_MS)
        self._options = options.model_copy(update={"registry_timeout_ms": timeout_ms})
        self._kind = kind
        self._lock = threading.Lock()
        self._registry: Registry | None = None
        self._highest = 0, "", ""  # id, subject and schema
        self._due_s = 0.0

    def note(self, schema_id: int, subject: str, text: str) -> None:
        """Note an id that the registry has just given for a schema under a subject."""
        with self._lock:
            if schema_id > self._highest[0]:
                self._highest = schema_id, subject, text
                self._due_s = time.monotonic() + CHECK_S

    def require(self) -> None:
        """Check the highest id, if that is due and no other thread does.

        :raises TailraceError: `REGISTRY_UNREACHABLE` if the registry does not have it any more.
        """
        if not self._highest[0] or time.monotonic() < self._due_s or not self._lock.acquire(blocking=False):
            return
        try:
            self._check()
        finally:
            self._lock.release()

    def _check(self) -> None:
        schema_id, subject, text = self._highest
        began_s = time.monotonic()
        try:
            if self._registry is None:
                self._registry = Registry(self._options, retries=0)
            self._registry.forget()
            found = self._registry.known_id(subject, text, self._kind)
        except TailraceError as error:
            found = 0 if is_missing(error) else schema_id
        ended_s = time.monotonic()
        self._due_s = ended_s + max(CHECK_S, _REST * (ended_s - began_s))
        if found == schema_id:
            return
        self._highest = 0, "", ""
        raise TailraceError(
            Kind.REGISTRY_UNREACHABLE,
            f"ask the schema registry about {subject!r}: the schema that had the id {schema_id} "
            f"{f'has {found} now' if found else 'is not there any more'}, so the registry lost schemas",
            "if it was restored from a backup or is a new one, restore all of it: readers cannot read the "
            "records of lost schemas, or take them for others. New records get the ids that it gives now",
            {"subject": subject, "registry": ", ".join(self._options.urls)},
        )

    def close(self) -> None:
        """Close the connection to the registry."""
        registry, self._registry = self._registry, None
        if registry is not None:
            registry.close()
