"""Runs the test suite, with version-dependent tests on each version of PostgreSQL: `make matrix`.

A version that is not installed is reported at the end; under CI this is a failure. Arguments go to pytest.

If only a few tests fail, they are run once more, alone. Those that then pass are reported at the end: each
shows a defect of the test or of the code under test, which must be fixed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tailrace_servers.install import has_install  # noqa: E402
from tests.support.postgres import ALL_VERSIONS  # noqa: E402 - found by the line above

TESTS_FAILED = 1  # pytest's exit status
#: Largest number of failures that are repeated: more are not due to chance.
AGAIN_MAX = 5


def main() -> int:
    """Run the suite; return 0 if all tests passed, on every version."""
    began_s = time.monotonic()
    missing = [version for version in ALL_VERSIONS if not has_install(version)]
    here = ",".join(str(version) for version in ALL_VERSIONS if version not in missing)
    # Tests' names contain random seeds, which must be the same when failed tests are repeated.
    run = os.environ["PYTEST_XDIST_TESTRUNUID"] = uuid.uuid4().hex
    status = _pytest(here, "--cache-clear", "--testrunuid", run, *sys.argv[1:])
    failed = _last_failed() if status == TESTS_FAILED else []
    if 0 < len(failed) <= AGAIN_MAX:
        print("\n== The failed tests once more, alone", flush=True)
        status = _pytest(here, "-m", "", *failed)
    minutes, seconds = divmod(round(time.monotonic() - began_s), 60)
    verdict = f"FAILED (pytest's status {status})" if status else "passed"
    print(f"\n== PostgreSQL {here}: {verdict} in {minutes}:{seconds:02} min")
    if failed and status == 0:
        print("Passed only alone:" + "".join(f"\n    {name}" for name in failed))
    for version in missing:
        print(f"PostgreSQL {version}: NOT INSTALLED, hence not tested")
    return int(status != 0 or (bool(missing) and bool(os.environ.get("CI"))))


def _pytest(versions: str, *arguments: str) -> int:
    command = [sys.executable, "-m", "pytest", "--postgres", versions, *arguments]
    return subprocess.run(command, check=False, cwd=ROOT).returncode


def _last_failed() -> list[str]:
    """Return the names of the failed tests, including files that could not be collected."""
    found = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
    return list(json.loads(found.read_text())) if found.exists() else []


if __name__ == "__main__":
    sys.exit(main())
