"""The names that columns have had: rules of masking and exclusion go by them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.disclosure import disclosure_is_kept, kept_renames
from tailrace.config import ColumnPolicy
from tailrace.decode.column_policy import TablePolicy
from tailrace.errors import Kind
from tailrace.pipeline.log.inspection import Selection, json_lines
from tailrace.protocol.facts import ColumnFacts, Facts
from tailrace.protocol.renames import Renames
from tests.support.capture.captured import capturing, run_to_end
from tests.support.postgres import Database

pytestmark = pytest.mark.each_postgres("what the catalogue says of columns")

MASKED = {"masks": [{"columns": ["public.people.email"], "method": "fixed"}]}


def test_the_server_is_asked_for_names_that_no_row_has_told_yet(pg: Database, tmp_path: Path) -> None:
    log = tmp_path / "log"
    pg.execute("create table users(id int primary key, mail text)")
    pg.execute("insert into users values (1, 'alice@x')")
    with capturing(pg.dsn, log) as running:
        running.wait_for("streaming")
        pg.execute("insert into users values (2, 'bob@x')")
        running.catch_up(pg.query)
    pg.execute("alter table users rename mail to email")
    pg.execute("alter table users rename to people")
    rules = ColumnPolicy.model_validate(MASKED)
    assert not disclosure_is_kept(LogDirectory.open(log), "0", rules)
    with capturing(pg.dsn, log, **MASKED) as running:
        running.wait_for("streaming")
    assert disclosure_is_kept(LogDirectory.open(log), "0", rules)
    assert shown(log, rules).count("****") == 2
    assert "@x" not in shown(log, rules)


def test_names_stay_known_when_a_column_is_dropped_and_the_log_says_so_by_itself(
    pg: Database, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    pg.execute("create table people(id int primary key, mail text)")
    with capturing(pg.dsn, log) as running:
        running.wait_for("streaming")
        for statement in (
            "insert into people values (1, 'alice@x')",
            "alter table people rename mail to email",
            "insert into people values (2, 'bob@x')",
            "alter table people drop email",
            "insert into people values (3)",
        ):
            pg.execute(statement)
            running.catch_up(pg.query)
    rules = ColumnPolicy.model_validate(MASKED)
    before = shown(log, rules)
    assert "****" in before
    assert "@x" not in before
    # A log that was written before names were kept beside it.
    for file in LogDirectory.open(log).task_path("0").glob("renames.state*"):
        file.unlink()
    assert kept_renames(LogDirectory.open(log), "0") is None
    assert shown(log, rules) == before


def shown(log: Path, rules: ColumnPolicy) -> str:
    directory = LogDirectory.open(log)
    return "\n".join(json_lines(directory, "0", Selection(), TablePolicy.of(rules)))


def test_a_column_that_nobody_could_identify_has_the_names_of_those_that_went() -> None:
    before = Facts(7, "public", "users", ("id",), (ColumnFacts("id", 1), ColumnFacts("mail", 2)), 1)
    after = Facts(7, "public", "users", ("id",), (ColumnFacts("id", 1), ColumnFacts("email")), 2)
    renames = Renames().after(before, after)
    assert renames.of(7, after.columns) == {
        "email": (("public", "users", "mail"), ("public", "users", "email"))
    }
    assert Renames.from_json(renames.as_json()) == renames


def test_a_new_column_of_an_old_name_is_another_one() -> None:
    before = Facts(7, "public", "users", ("id",), (ColumnFacts("id", 1), ColumnFacts("mail", 2)), 1)
    after = Facts(7, "public", "users", ("id",), (ColumnFacts("id", 1), ColumnFacts("mail", 3)), 2)
    assert Renames().after(before, after) == Renames()


def masking(*columns: str) -> dict[str, object]:
    return {"masks": [{"columns": list(columns), "method": "fixed"}]}


@pytest.mark.follows("config_invalid")
def test_a_mask_that_names_no_column_never_lets_a_start_begin(pg: Database, tmp_path: Path) -> None:
    log = tmp_path / "log"
    pg.execute("create table users(id int primary key, mail text)")
    pg.execute("insert into users values (1, 'alice@x')")
    # As often as it is tried: what was refused is not known from before.
    for _ in range(2):
        error = run_to_end(pg.dsn, log, **masking("public.users.mial"))
        assert error is not None
        assert error.kind is Kind.CONFIG_INVALID
        assert "'public.users.mial' names no column" in error.message
        assert "the columns of public.users are: id, mail;" in error.hint
    assert pg.query("select count(*) from pg_replication_slots") == [(0,)]
    assert pg.query("select count(*) from pg_publication") == [(0,)]
    corrected = error.hint.partition("are: ")[2].partition(";")[0].split(", ")[1]
    rules = masking(f"public.users.{corrected}")
    with capturing(pg.dsn, log, **rules) as running:
        running.wait_for("streaming")
        running.catch_up(pg.query)
    assert "@x" not in shown(log, ColumnPolicy.model_validate(rules))
    # One that is added later has to find its column, too; by an earlier name it does.
    pg.execute("alter table users rename mail to email")
    error = run_to_end(pg.dsn, log, **masking("public.users.mail", "public.users.adress"))
    assert error is not None
    assert "'public.users.adress' names no column" in error.message
    for rules in (masking("public.users.mail"), masking("public.users.email", "public.users.mail")):
        with capturing(pg.dsn, log, **rules) as running:
            running.wait_for("streaming")
    # AND a column that is dropped stops nothing, nor does a pattern that may mean nothing.
    pg.execute("alter table users drop email")
    with capturing(pg.dsn, log, **masking("public.users.email", "public.users.mail")) as running:
        running.wait_for("streaming")
    with capturing(pg.dsn, log, **masking("public.users.mail", "public.later*.mail")) as running:
        running.wait_for("streaming")
        pg.execute("create table later(id int primary key, mail text)")
