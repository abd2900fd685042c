"""The names that columns have had: masks and exclusions refer to any of them."""

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


def test_new_names_of_columns_without_new_rows_are_read_from_the_server(pg: Database, tmp_path: Path) -> None:
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


def test_the_names_of_a_dropped_column_can_be_read_from_the_log_alone(pg: Database, tmp_path: Path) -> None:
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
    # A log of a version that did not keep names beside it.
    for file in LogDirectory.open(log).task_path("0").glob("renames.state*"):
        file.unlink()
    assert kept_renames(LogDirectory.open(log), "0") is None
    assert shown(log, rules) == before


def shown(log: Path, rules: ColumnPolicy) -> str:
    directory = LogDirectory.open(log)
    return "\n".join(json_lines(directory, "0", Selection(), TablePolicy.of(rules)))


def test_an_unidentified_column_has_the_names_of_the_columns_that_disappeared() -> None:
    before = Facts(7, "public", "users", ("id",), (ColumnFacts("id", 1), ColumnFacts("mail", 2)), 1)
    after = Facts(7, "public", "users", ("id",), (ColumnFacts("id", 1), ColumnFacts("email")), 2)
    renames = Renames().after(before, after)
    assert renames.of(7, after.columns) == {
        "email": (("public", "users", "mail"), ("public", "users", "email"))
    }
    assert Renames.from_json(renames.as_json()) == renames


def test_a_new_column_with_an_old_name_is_another_column() -> None:
    before = Facts(7, "public", "users", ("id",), (ColumnFacts("id", 1), ColumnFacts("mail", 2)), 1)
    after = Facts(7, "public", "users", ("id",), (ColumnFacts("id", 1), ColumnFacts("mail", 3)), 2)
    assert Renames().after(before, after) == Renames()


def masking(*columns: str) -> dict[str, object]:
    return {"masks": [{"columns": list(columns), "method": "fixed"}]}


@pytest.mark.follows("config_invalid")
def test_a_mask_that_names_no_column_stops_every_start(pg: Database, tmp_path: Path) -> None:
    log = tmp_path / "log"
    pg.execute("create table users(id int primary key, mail text)")
    pg.execute("insert into users values (1, 'alice@x')")
    # Also at the second attempt: the first one leaves nothing behind that would let it pass.
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
    # A mask added later must find its column, too; an earlier name counts.
    pg.execute("alter table users rename mail to email")
    error = run_to_end(pg.dsn, log, **masking("public.users.mail", "public.users.adress"))
    assert error is not None
    assert "'public.users.adress' names no column" in error.message
    for rules in (masking("public.users.mail"), masking("public.users.email", "public.users.mail")):
        with capturing(pg.dsn, log, **rules) as running:
            running.wait_for("streaming")
    # A dropped column stops nothing, nor does a pattern that matches nothing.
    pg.execute("alter table users drop email")
    with capturing(pg.dsn, log, **masking("public.users.email", "public.users.mail")) as running:
        running.wait_for("streaming")
    with capturing(pg.dsn, log, **masking("public.users.mail", "public.later*.mail")) as running:
        running.wait_for("streaming")
        pg.execute("create table later(id int primary key, mail text)")
