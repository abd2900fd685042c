"""A headless browser: Debian's Chromium, which `make browser` installs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, ChromeOptions, ChromeService

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")

#: No requests except those of the test.
_FLAGS = (
    "--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--no-proxy-server",
)  # fmt: skip


@contextmanager
def browser(profile: Path) -> Iterator[Chrome]:
    """Start a browser with a new profile. If it is not installed, skip the test; under CI fail it."""
    if not (CHROMIUM.exists() and DRIVER.exists()):
        if os.environ.get("CI"):
            pytest.fail("Chromium is not installed, and CI tests with it: make browser", pytrace=False)
        pytest.skip("Chromium is not installed: make browser")
    options = ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*_FLAGS, f"--user-data-dir={profile}", *(["--no-sandbox"] if os.geteuid() == 0 else [])):
        options.add_argument(flag)
    found = Chrome(options, ChromeService(str(DRIVER)))
    try:
        yield found
    finally:
        found.quit()
