#!/bin/sh
# Installs Debian's Chromium and its driver, to test the page in examples/. Needs root, unless they exist.
set -eu
if [ -x /usr/bin/chromium ] && [ -x /usr/bin/chromedriver ]; then
    exit 0
fi
if [ "$(id -u)" != 0 ]; then
    echo "install the packages chromium and chromium-driver, or run this as root" >&2
    exit 1
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends chromium chromium-driver >/dev/null
