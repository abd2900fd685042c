"""Options of the data source, positions, errors from Spark, and Java."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from tailrace.errors import Kind, TailraceError
from tailrace.model import ValueModes, parse_lsn
from tailrace.spark.java import launch_jvm, major_version, require_java, require_same_spark
from tailrace.spark.jobs import translated
from tailrace.spark.join.options import JoinReadOptions
from tailrace.spark.options import ReadOptions
from tailrace.spark.session import delta_coordinates, settings_of


def test_options_are_found_in_any_case() -> None:
    options = ReadOptions.parse({"PATH": "/log", "maxrowspertrigger": "10", "startingoffset": "latest"})
    assert (options.path, options.rows_max, options.starting) == ("/log", 10, "latest")


def test_handling_modes_have_debeziums_names_in_any_case() -> None:
    options = ReadOptions.parse(
        {"path": "/log", "table": "a.b", "decimal_handling_mode": "PRECISE", "moneyfractiondigits": "3"}
    )
    assert options.value_modes == ValueModes(decimal="precise", money_fraction_digits=3)


def test_options_of_the_other_kind_of_reader_are_refused() -> None:
    for name in ("maxRowsPerTrigger", "maxBytesPerTrigger", "readerName"):
        with pytest.raises(TailraceError, match=f"{name} is an option of streams"):
            ReadOptions.parse({"path": "/log", name: "1"}).refuse_limits()
    ReadOptions.parse({"path": "/log", "readerName": "", "endingOffset": "7"}).refuse_limits()
    with pytest.raises(TailraceError, match="endingOffset is an option of batches"):
        ReadOptions.parse({"path": "/log", "endingOffset": "7"}).refuse_ending()


@pytest.mark.parametrize(
    "text", ["-1/0", "+1/0", "1_0/0", "0x1/0", "1/ 0", "1/0\n", "1/", "123456789/0", "1/2/3"]
)
def test_an_lsn_has_two_hexadecimal_numbers(text: str) -> None:
    with pytest.raises(ValueError, match="not an LSN"):
        parse_lsn(text)
    assert parse_lsn("16/b374D848") == 0x16_B374_D848


def test_a_path_may_be_a_file_url_or_relative() -> None:
    assert ReadOptions.parse({"path": "file:///a%20b"}).path == "/a b"
    assert ReadOptions.parse({"path": "x"}).path == os.path.abspath("x")


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ({"path": "/log", "tabel": "a.b"}, "'tabel' is not an option", "did you mean table?"),
        ({"path": "/log", "zzz": "1"}, "'zzz' is not an option", "path, task, table, startingOffset"),
        ({}, "no path", "name the log's directory"),
        ({"path": "s3a://lake/log"}, "path is a URL, of s3a", "a local or mounted file system"),
        ({"path": "/log", "table": "orders"}, "table is 'orders'", "schema.table"),
        ({"path": "/log", "maxRowsPerTrigger": "0"}, "maxRowsPerTrigger is '0'", "greater than 0"),
        ({"path": "/log", "maxBytesPerTrigger": "1g"}, "maxBytesPerTrigger is '1g'", "whole number"),
        ({"path": "/log", "readerName": "é" * 60}, "readerName has 60 characters", "shorter"),
        ({"path": "/log", "raw": "perhaps"}, "raw is 'perhaps'", "true or false"),
        (
            {"path": "/log", "table": "a.b", "decimalHandlingMode": "exact", "maxRowsPerTrigger": "-1"},
            "the option decimalHandlingMode is 'exact', the option maxRowsPerTrigger is '-1'",
            "decimalHandlingMode must be one of 'precise', 'double' or 'string'; maxRowsPerTrigger must be",
        ),
        ({"path": "/log", "decimalhandlingmode": "precise"}, "decimalHandlingMode is set", "name a table"),
        ({"path": "/log", "unavailableValuePlaceholder": "x"}, "is not an option", "the options are"),
    ],
)
def test_a_wrong_option_is_refused_with_a_hint(given: dict[str, str], message: str, hint: str) -> None:
    with pytest.raises(TailraceError) as caught:
        ReadOptions.parse(given)
    assert caught.value.kind is Kind.CONFIG_INVALID
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kafka.group.id": "x"}, "the option kafka.*: group.id can't be set"),
        ({"kafka.client.id": "${env"}, "the option kafka.client.id: holds a reference that is neither"),
        ({"registry": '{"registry_url": []}'}, "the option registry.registry_url: must have at least 1"),
    ],
)
def test_a_wrong_option_of_a_join_is_named_as_it_is_written(given: dict[str, str], message: str) -> None:
    topics = {"bootstrapServers": "h:1", "data": "a", "transactions": "t"}
    with pytest.raises(TailraceError) as caught:
        JoinReadOptions.parse(topics | given)
    assert message in caught.value.message


def test_an_executors_error_keeps_kind_message_context_and_hint() -> None:
    raised = TailraceError(
        Kind.LOG_CORRUPT, "read block: (its) checksum differs", "restore it", {"file": "a.seg", "byte": 7}
    )
    text = (
        "An error occurred while calling o57.collect.\n: org.apache.spark.SparkException: Job aborted\n"
        f'  File "changes.py", line 3\ntailrace.errors.TailraceError: {raised}\n\n\tat org.apache.spark.api\n'
    )
    found = translated(RuntimeError(text))
    assert (found.kind, found.message, found.hint) == (raised.kind, raised.message, raised.hint)
    assert found.context == {"file": "a.seg", "byte": "7"}


def test_any_other_failure_of_spark_is_reported_in_one_line() -> None:
    found = translated(RuntimeError("\n  Job aborted due to stage failure\nmore\n" + "x" * 10_000))
    assert found.kind is Kind.SPARK_FAILED
    assert found.message == "run a Spark job: RuntimeError: Job aborted due to stage failure"


@pytest.mark.parametrize(
    ("answer", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_402"', 8),
        ('openjdk version "26-ea"', 26),
        ("no such thing", None),
    ],
)
def test_the_version_of_java_is_read(answer: str, version: int | None) -> None:
    assert major_version(answer) == version


def fake_java(home: Path, version: str) -> None:
    (home / "bin").mkdir(parents=True)
    java = home / "bin" / "java"
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    java.chmod(0o755)


def test_a_java_that_is_too_old_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_java(tmp_path, "11.0.2")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(TailraceError, match="is version 11, Spark needs 17") as caught:
        require_java()
    assert caught.value.kind is Kind.ENVIRONMENT_UNFIT
    assert "\n" not in caught.value.message + caught.value.hint


def test_a_spark_home_of_another_release_is_reported_before_its_spark_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Path(pyspark.__file__).parent
    monkeypatch.setenv("SPARK_HOME", str(own))
    require_same_spark()
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars" / "spark-core_2.12-3.5.1.jar").touch()
    for home in (tmp_path, tmp_path / "nowhere"):
        monkeypatch.setenv("SPARK_HOME", str(home))
        with pytest.raises(TailraceError, match=r"SPARK_HOME is '.*', which has no Spark") as caught:
            launch_jvm({})
        assert caught.value.kind is Kind.ENVIRONMENT_UNFIT
        assert "unset SPARK_HOME" in caught.value.hint


def test_java_home_is_used_before_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(tmp_path, "21.0.1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert require_java() == 21


@pytest.mark.follows("environment_unfit")
@pytest.mark.parametrize("home", ["", "/nowhere/at/all"])
def test_a_missing_java_is_reported_in_one_line_with_a_hint(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("JAVA_HOME", home)
    with pytest.raises(TailraceError) as caught:
        require_java()
    assert caught.value.kind is Kind.ENVIRONMENT_UNFIT
    hint = r"install Java (\d+) or later .* on PATH, or set JAVA_HOME to its folder"
    found = re.search(hint, caught.value.hint)
    assert found is not None
    java = tmp_path / "java"
    fake_java(java, f"{found[1]}.0.1")
    if home:
        monkeypatch.setenv("JAVA_HOME", str(java))
    else:
        monkeypatch.setenv("PATH", str(java / "bin"))
    assert require_java() == int(found[1])


def test_deltas_jars_are_taken_from_the_configured_directory_without_those_of_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for jar in ("delta-spark_4.2_2.13-4.4.0.jar", "delta-storage-4.4.0.jar", "scala-library-2.13.1.jar"):
        (tmp_path / jar).touch()
    monkeypatch.setenv("TAILRACE_JARS", str(tmp_path))
    jars = settings_of(None, "x")["spark.driver.extraClassPath"].split(":")
    assert [Path(jar).name for jar in jars] == ["delta-spark_4.2_2.13-4.4.0.jar", "delta-storage-4.4.0.jar"]


def test_without_jars_spark_fetches_the_matching_version_of_delta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAILRACE_JARS", str(tmp_path))
    assert settings_of(None, "x")["spark.jars.packages"] == delta_coordinates()
    assert delta_coordinates().startswith("io.delta:delta-spark_4.")


LAUNCH = """
import sys
from tailrace.errors import TailraceError
from tailrace.spark.java import launch_jvm

try:
    launch_jvm({"spark.driver.extraJavaOptions": "-XX:+UseG1GC -XX:+UseSerialGC"})
except TailraceError as error:
    print(error)
gateway = launch_jvm({"spark.driver.extraJavaOptions": "-XX:+UseSerialGC"})
print(gateway.jvm.java.lang.Math.abs(-17))
gateway.shutdown()
"""


@pytest.mark.follows("spark_failed")
@pytest.mark.slow
def test_a_setting_that_java_refuses_is_corrected() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH], capture_output=True, text=True, check=False, timeout=240
    )
    refused, _, hint_and_rest = done.stdout.partition("\n  hint: ")
    assert refused.startswith("spark_failed: "), done.stderr
    assert "garbage collectors selected" in refused
    assert hint_and_rest.startswith("correct the setting that it names, in spark.conf")
    assert hint_and_rest.endswith("\n17\n"), done.stderr
