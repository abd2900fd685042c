#!/bin/sh
# Checks Java, as Spark finds it: in JAVA_HOME, then in PATH. Prints a problem in one line. Runs before
# anything is downloaded.
set -u

need=17
hint="install a JDK or JRE of version $need or later (Debian: openjdk-$need-jre-headless), or set JAVA_HOME to one"

if [ -n "${JAVA_HOME:-}" ]; then
    java="$JAVA_HOME/bin/java"
else
    java="java"
fi
if ! command -v "$java" >/dev/null 2>&1; then
    echo "tailrace needs Java $need or later: $java was not found; $hint" >&2
    exit 1
fi

# `openjdk version "17.0.15" 2025-04-15`, `java version "1.8.0_402"`, `openjdk version "25-ea"`
version=$("$java" -version 2>&1 | sed -n 's/.* version "\([^"]*\)".*/\1/p' | head -n 1)
major=$(printf '%s\n' "$version" | sed 's/^1\.//; s/[^0-9].*//')
if [ -z "$major" ]; then
    echo "tailrace needs Java $need or later: $java does not print its version; $hint" >&2
    exit 1
fi
if [ "$major" -lt "$need" ]; then
    echo "tailrace needs Java $need or later: $java is version $version; $hint" >&2
    exit 1
fi
