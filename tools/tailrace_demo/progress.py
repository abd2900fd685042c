"""The pipeline's progress, from the document of `tailrace status`."""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.config import EngineConfig
from tailrace.model import parse_lsn
from tailrace.pipeline.status import document as status


@dataclass(frozen=True, slots=True)
class PipelinePositions:
    """Positions of the pipeline at one moment.

    `position` is an LSN of the source; `sinks` are log offsets by sink, 0 for none.
    """

    position: int
    log_end: int
    sinks: dict[str, int]

    @property
    def phrase(self) -> str:
        """A short description of the positions."""
        if not self.log_end:
            return "no log yet"
        behind = self.log_end - min(self.sinks.values())
        return f"log {_size(self.log_end)}, lake {_size(behind)} behind"

    def beyond(self, before: PipelinePositions) -> bool:
        """Return whether every sink has advanced since `before`."""
        return all(position > before.sinks[name] for name, position in self.sinks.items())

    def has_everything_after(self, lsn: int) -> bool:
        """Return whether a change after `lsn` was captured, and every sink has the whole log."""
        return self.position > lsn and min(self.sinks.values()) >= self.log_end


def progress(config: EngineConfig) -> PipelinePositions:
    """Return the pipeline's progress, even if it is not running."""
    document = status.document(config)
    task = document["tasks"][0]
    return PipelinePositions(
        position=parse_lsn(task.get("position") or "0/0"),
        log_end=task["log_end"] or 0,
        sinks={sink["name"]: sink["position"] or 0 for sink in document["sinks"]},
    )


def _size(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.0f} kB"
