"""The test suite on each version of PostgreSQL: `make matrix`.

The newest version runs everything, the others what needs a server (tests/support/postgres.py). A
version that is not installed is named at the end; under CI that fails. Arguments go to pytest.
"""

from __future__ import annotations

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


def main() -> int:
    """Run the suite once a version; return 0 if every one of them passed."""
    outcomes: dict[int, str] = {}
    for version in ALL_VERSIONS:
        if not has_install(version):
            outcomes[version] = "NOT INSTALLED, hence not tested"
            continue
        print(f"\n== PostgreSQL {version}", flush=True)
        began_s = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *sys.argv[1:]],
            check=False,
            cwd=ROOT,
            env={**os.environ, "TAILRACE_TEST_POSTGRES": str(version)},
        )
        minutes, seconds = divmod(round(time.monotonic() - began_s), 60)
        verdict = VERDICTS.get(done.returncode, f"FAILED (pytest's status {done.returncode})")
        outcomes[version] = f"{verdict} in {minutes}:{seconds:02} min"
    print("\n== Matrix")
    for version, outcome in outcomes.items():
        print(f"PostgreSQL {version}: {outcome}")
    missing = any(outcome.startswith("NOT") for outcome in outcomes.values())
    failed = any(outcome.startswith("FAILED") for outcome in outcomes.values())
    return int(failed or (missing and bool(os.environ.get("CI"))))


if __name__ == "__main__":
    sys.exit(main())
