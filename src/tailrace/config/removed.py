"""Keys and values that earlier versions had, and what to write instead of each."""

from __future__ import annotations

from collections.abc import Mapping

_OFFSETS = "keep offsets by `type: log`, `file` or `kafka`, where the engine begins with the log's start"

#: By section and key, and value where the key has others: what takes its place.
REMOVED: Mapping[str, str] = {
    "source.snapshot_read_on": "leave it out: snapshots are read over `snapshot_connections` connections",
    "offset_storage.type: postgresql": _OFFSETS,
    "offset_storage.dsn": _OFFSETS,
    "offset_storage.table": _OFFSETS,
    "converter.registry_deadline_ms": "set `registry_timeout_ms`: a request is made up to three times at "
    "each address of the registry",
    "sinks.dead_letter_value_bytes": "leave it out: `tailrace log show` at the letter's "
    "`tailrace.log_offset` has the change",
    "sinks.too_large": "set `dead_letter_topic` for dead letters, such as `<topic_prefix>.dead-letter`; "
    "without it a record that is too large stops the sink",
    "sinks.schema_changes": "set `schema_changes_topic`, such as to `<topic_prefix>`; without it there are "
    "none",
    "sinks.heartbeat_topic": "set `heartbeat_topic_prefix`: the topic is "
    "`<heartbeat_topic_prefix>.<topic_prefix>`",
}


def instead_of(path: tuple[str | int, ...], value: object = None) -> str | None:
    """Return why a key, or a value of it, is refused that an earlier version had; None if none had it.

    :param path: of the key in the file.
    :param value: None: any.
    """
    names = [str(part) for part in path if not isinstance(part, int)]
    names = ["source" if name == "sources" else name for name in names]
    key = ".".join(names[-2:])
    found = REMOVED.get(key if value is None else f"{key}: {value}")
    return None if found is None else f"is not a setting any more: {found}"
