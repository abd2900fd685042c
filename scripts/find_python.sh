#!/bin/sh
# Prints the Python with which to create .venv: $PYTHON if set, otherwise the first one of 3.11 or later
# that can create an environment. If there is none, prints the problem in one line.
set -u

usable='import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))'
for python in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
    if command -v "$python" >/dev/null 2>&1 && "$python" -c "$usable" 2>/dev/null; then
        command -v "$python"
        exit 0
    fi
done
echo "tailrace needs Python 3.11 or later with the modules venv and ensurepip (Debian: python3-venv); tried ${PYTHON:-python3, python3.11 to python3.14}" >&2
exit 1
