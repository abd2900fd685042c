"""`check`: prints the findings of preflight, as JSON or text."""

from __future__ import annotations

from pathlib import Path

from tailrace import config
from tailrace.cli.conversation import DONE, FAILED, UNUSABLE, print_json
from tailrace.errors import TailraceError, printable
from tailrace.pipeline.preflight.preflight import Finding, Severity, preflight
from tailrace.sources.findings import from_failure


def check_pipeline(file: Path, *, as_json: bool) -> int:
    """Print every problem that the pipeline of `file` has; return the exit status."""
    found = preflight(file) + _of_subscriptions(file)
    errors = [finding for finding in found if finding.severity is Severity.ERROR]
    if as_json:
        print_json({"ok": not errors, "problems": [finding.as_json() for finding in found]})
    else:
        print("\n".join(words(found)))
    if any(finding.is_configuration for finding in errors):
        return UNUSABLE
    return FAILED if errors else DONE


def _of_subscriptions(file: Path) -> list[Finding]:
    pipeline, _ = config.read(file)
    if pipeline is None or pipeline.subscriptions is None:
        return []
    from tailrace.subscriptions.server import require_ready

    try:
        require_ready(pipeline.subscriptions)
    except TailraceError as failure:
        return [from_failure(failure)]
    return []


def words(found: list[Finding]) -> list[str]:
    """Return the findings as lines of text, errors first."""
    if not found:
        return ["ready: no problem found"]
    lines: list[str] = []
    for finding in sorted(found, key=lambda finding: finding.severity is not Severity.ERROR):
        where = " ".join(filter(None, (finding.source, finding.table)))
        place = f" [{printable(where)}]" if where else ""
        lines.append(f"{finding.severity}: {finding.kind}{place}: {printable(finding.message)}")
        if finding.repair:
            lines.append(f"  repair: {printable(finding.repair)}")
    errors = sum(finding.severity is Severity.ERROR for finding in found)
    warnings = len(found) - errors
    lines.append(f"{'not ready' if errors else 'ready'}: {errors} error(s), {warnings} warning(s)")
    return lines
