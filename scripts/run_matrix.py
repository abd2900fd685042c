"""The test suite on each version of PostgreSQL: `make matrix`.

The newest version runs everything, the others what needs a server (tests/support/postgres.py). A
version that is not installed is named at the end; under CI that fails. Arguments go to pytest.

A few tests that fail beside others are run once more, alone. Those that pass then are named at the end:
each is a fault of the test or of what it tests, and is to be mended.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tailrace_servers.install import has_install  # noqa: E402
from tests.support.postgres import ALL_VERSIONS  # noqa: E402 - found by the line above

#: By pytest's exit status: 5 is that of a choice in which no test needs a server.
VERDICTS = {0: "passed", 5: "nothing to test"}
TESTS_FAILED = 1
#: More failures than this are not chance.
AGAIN_MAX = 5


def main() -> int:
    """Run the suite once a version; return 0 if every one of them passed."""
    outcomes: dict[int, str] = {}
    for version in ALL_VERSIONS:
        if not has_install(version):
            outcomes[version] = "NOT INSTALLED, hence not tested"
            continue
        print(f"\n== PostgreSQL {version}", flush=True)
        began_s = time.monotonic()
        status = _pytest(version, "--cache-clear", *sys.argv[1:])
        failed = _last_failed() if status == TESTS_FAILED else []
        if 0 < len(failed) <= AGAIN_MAX:
            print(f"\n== PostgreSQL {version}: those that failed, once more, alone", flush=True)
            status = _pytest(version, *failed)
        minutes, seconds = divmod(round(time.monotonic() - began_s), 60)
        verdict = VERDICTS.get(status, f"FAILED (pytest's status {status})")
        outcomes[version] = f"{verdict} in {minutes}:{seconds:02} min"
        if failed and status == 0:
            outcomes[version] += ", only alone:" + "".join(f"\n    {name}" for name in failed)
    print("\n== Matrix")
    for version, outcome in outcomes.items():
        print(f"PostgreSQL {version}: {outcome}")
    missing = any(outcome.startswith("NOT") for outcome in outcomes.values())
    has_failed = any(outcome.startswith("FAILED") for outcome in outcomes.values())
    return int(has_failed or (missing and bool(os.environ.get("CI"))))


def _pytest(version: int, *arguments: str) -> int:
    command = [sys.executable, "-m", "pytest", *arguments]
    env = {**os.environ, "TAILRACE_TEST_POSTGRES": str(version)}
    return subprocess.run(command, check=False, cwd=ROOT, env=env).returncode


def _last_failed() -> list[str]:
    """Return the names of the tests that failed; files that could not be collected among them."""
    found = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
    return list(json.loads(found.read_text())) if found.exists() else []


if __name__ == "__main__":
    sys.exit(main())
