"""The columns that `check` and a start compare with the settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailrace.config.source.vitess import VitessSource
from tailrace.errors import Kind, TailraceError
from tailrace.sources.findings import Finding, Severity
from tailrace.sources.vitess.preflight import VitessCheck
from tests.support.vitess.capturing import capturing
from tests.support.vitess.fake_vtgate import KEYSPACE, TABLE, FakeVtgate
from tests.support.wait import wait_until

_MASK = {"method": "fixed", "value": 0}


def _checked(vtgate: FakeVtgate, **settings: Any) -> list[Finding]:
    given = {"hosts": [vtgate.address], "keyspace": KEYSPACE, **settings}
    check = VitessCheck(VitessSource.model_validate(given))
    try:
        assert not [*check.connect()]
        return [*check.findings()]
    finally:
        check.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"columns": [f"{KEYSPACE}.{TABLE}.contuer"]},
        {"columns_exclude": [f"{KEYSPACE}.{TABLE}.contuer"]},
        {"masks": [{"columns": [f"{KEYSPACE}.{TABLE}.contuer"], **_MASK}]},
    ],
)
def test_a_pattern_that_names_no_column_is_refused_before_anything_is_captured(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    with FakeVtgate("-80", "80-") as vtgate:
        vtgate.write("-80", (1, 0))
        vtgate.change("-80", has_tablet=False)  # any shard that answers is asked
        with capturing(tmp_path, vtgate.address, snapshot="initial", **settings) as found:
            wait_until(lambda: found.failure is not None, 30, "the start is refused")
        assert isinstance(found.failure, TailraceError)
        assert found.failure.kind is Kind.CONFIG_INVALID
        assert f"the columns of {KEYSPACE}.{TABLE} are: id, counter" in found.failure.hint
        assert not vtgate.requests
        [reported] = [each for each in _checked(vtgate, **settings) if "contuer" in each.message]
        assert (reported.kind, reported.severity) == (Kind.CONFIG_INVALID, Severity.ERROR)


@pytest.mark.parametrize(
    "settings",
    [
        {"columns_exclude": ["*.*.id"]},
        {"masks": [{"columns": ["*.*.id"], **_MASK}]},
        {"message_keys": {"*.*": ["contuer"]}},
    ],
)
def test_settings_with_which_rows_could_not_be_identified_are_refused(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    with FakeVtgate("0") as vtgate:
        with capturing(tmp_path, vtgate.address, **settings) as found:
            wait_until(lambda: found.failure is not None, 30, "the start is refused")
        assert isinstance(found.failure, TailraceError)
        assert found.failure.kind is Kind.CONFIG_INVALID
        assert f"{KEYSPACE}.{TABLE}" in found.failure.message
        [reported] = [each for each in _checked(vtgate, **settings) if each.severity is Severity.ERROR]
    assert (reported.kind, reported.table) == (Kind.CONFIG_INVALID, f"{KEYSPACE}.{TABLE}")


def test_a_mistyped_keyspace_leaves_no_log_behind(tmp_path: Path) -> None:
    with FakeVtgate("0") as vtgate:
        with capturing(tmp_path, vtgate.address, keyspace="shopp") as found:
            wait_until(lambda: found.failure is not None, 30, "the start is refused")
        assert isinstance(found.failure, TailraceError)
        assert (found.failure.kind, found.failure.hint) == (
            Kind.SOURCE_MISCONFIGURED,
            "check source.keyspace",
        )
        with capturing(tmp_path, vtgate.address) as found:
            found.wait_for_shards("0")


def test_a_column_that_is_dropped_after_a_start_does_not_prevent_the_next_one(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"columns_exclude": [f"{KEYSPACE}.{TABLE}.counter"]}
    with FakeVtgate("0") as vtgate:
        for number in range(2):
            with capturing(tmp_path, vtgate.address, **settings) as found:
                found.wait_for_shards("0")
                vtgate.write("0", (number, 0))
                found.wait_for_rows(1)
            vtgate.columns.pop()
        settings["columns_exclude"] += [f"{KEYSPACE}.*.later"]
        with capturing(tmp_path, vtgate.address, **settings) as found:
            found.wait_for_shards("0")


@pytest.mark.parametrize(
    ("column", "found"),
    [
        (["place", "geohash", "YES", "", "0", ""], "'geohash' is not supported"),
        (["name", "varchar(20)", "YES", "", "28", "gbk"], "one that Vitess does not know"),
        (["name", "text", "YES", "", "12", "ujis"], "number 12, can't be read"),
    ],
)
def test_check_names_columns_that_a_run_would_refuse(column: list[str], found: str) -> None:
    with FakeVtgate("0") as vtgate:
        vtgate.columns.append([TABLE, *column])
        [reported] = [each for each in _checked(vtgate) if each.kind is Kind.DECODE_FAILED]
        assert found in reported.message
        assert (reported.severity, reported.table) == (Severity.ERROR, f"{KEYSPACE}.{TABLE}")
        for settings in ({"columns_exclude": [f"*.*.{column[0]}"]}, {"tables_exclude": [f"*.{TABLE}"]}):
            assert not [each for each in _checked(vtgate, **settings) if each.severity is Severity.ERROR]


def test_check_warns_of_patterns_that_match_no_table() -> None:
    with FakeVtgate("0") as vtgate:
        for tables, found in (
            ([f"{KEYSPACE}.{TABLE}", f"{KEYSPACE}.contuers"], f"matches '{KEYSPACE}.contuers'"),
            ([f"{KEYSPACE}.contuers", "other.*"], "is captured"),
            (["*.*"], ""),
        ):
            told = [
                each.message for each in _checked(vtgate, tables=tables) if each.kind is Kind.TABLE_MISSING
            ]
            expected = f"source.tables: no table of the keyspace '{KEYSPACE}' {found}"
            assert told == ([expected] if found else [])
