"""What `make` needs on a machine; and its lock files agree with each other."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
import xml.etree.ElementTree as ET
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        # The suite runs under make itself, whose settings must not reach a make in here.
        env={name: text for name, text in os.environ.items() if not name.startswith("MAKE")} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def java_home(directory: Path, version_line: str) -> str:
    (directory / "bin").mkdir()
    java = directory / "bin" / "java"
    java.write_text(f"#!/bin/sh\necho '{version_line}' >&2\n")
    java.chmod(0o755)
    return str(directory)


@pytest.mark.parametrize(
    "version_line",
    [
        'openjdk version "17.0.15" 2025-04-15',
        'java version "21" 2023-09-19 LTS',
        'openjdk version "25-ea" 2025-09-16',
        'Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "18.0.1"',
    ],
)
def test_java_17_and_later_is_accepted_without_a_message(tmp_path, version_line):
    done = run("sh", "scripts/check_java.sh", JAVA_HOME=java_home(tmp_path, version_line))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("version_line", "complaint"),
    [
        ('openjdk version "11.0.22" 2024-01-16', "is version 11.0.22"),
        ('java version "1.8.0_402"', "is version 1.8.0_402"),
        ("no java at all", "does not print its version"),
    ],
)
def test_an_unsuitable_java_is_reported_in_one_line_before_anything_else(tmp_path, version_line, complaint):
    done = run("sh", "scripts/check_java.sh", JAVA_HOME=java_home(tmp_path, version_line))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "needs Java 17 or later" in done.stderr
    assert complaint in done.stderr


def test_a_missing_java_is_reported_in_one_line(tmp_path):
    done = run("sh", "scripts/check_java.sh", JAVA_HOME=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "was not found" in done.stderr


@pytest.mark.parametrize("target", ["demo", "test", "check", "bench", "torture", "setup", "lock"])
def test_every_target_checks_java_before_it_does_anything(target):
    plan = run("make", "--always-make", "--dry-run", target)
    assert plan.returncode == 0, plan.stderr
    assert plan.stdout.splitlines()[0] == "sh scripts/check_java.sh"


def test_a_python_that_cannot_make_an_environment_is_reported_in_one_line(tmp_path):
    done = run("sh", "scripts/find_python.sh", PYTHON=str(tmp_path / "python3"))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "needs Python 3.11 or later" in done.stderr


@pytest.mark.parametrize(
    ("ivy", "lock", "artifact"),
    [
        ("ivy.xml", "jars.lock", "delta-spark_{spark_line}_2.13-{delta}.jar"),
        ("ivy-spark-kafka.xml", "jars-spark-kafka.lock", "spark-sql-kafka-0-10_2.13-{spark}.jar"),
    ],
)
def test_the_jars_are_those_of_the_installed_delta_and_spark(ivy, lock, artifact):
    wanted = {
        f"{each.attrib['name']}-{each.attrib['rev']}.jar"
        for each in ET.parse(ROOT / "scripts" / ivy).iter("dependency")  # noqa: S314 - our own file
    }
    spark, delta = version("pyspark"), version("delta-spark")
    spark_line = ".".join(spark.split(".")[:2])
    assert artifact.format(spark=spark, spark_line=spark_line, delta=delta) in wanted
    assert {line.split()[1] for line in (ROOT / lock).read_text().splitlines()} == wanted


def test_every_dependency_is_locked_with_hashes():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named = [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["demo"]]
    for group in ("test", "lint", "build"):
        named += project["dependency-groups"][group]
    lock = (ROOT / "requirements.lock").read_text()
    locked = set(re.findall(r"^([a-z0-9-]+)==", lock, re.MULTILINE))
    assert {re.split(r"[\[=<>]", name)[0] for name in named} <= locked
    pins = re.findall(r"^[a-z0-9-]+==.*(?:\n    --hash=sha256:[0-9a-f]{64}(?: \\)?)+", lock, re.MULTILINE)
    assert len(pins) == len(re.findall(r"^[a-z0-9-]+==", lock, re.MULTILINE))
