"""How the options of the file become libpq's."""

from __future__ import annotations

import pytest
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict

from tailrace.config import PostgresSource
from tailrace.config.source.postgres import OWN_OPTIONS, LibpqOptions


def options(**fields):
    overrides = fields.pop("overrides", {})
    return conninfo_to_dict(PostgresSource(**fields).conninfo(**overrides))


def test_every_option_of_libpq_is_a_field_or_our_own():
    known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    assert known - set(OWN_OPTIONS) <= set(LibpqOptions.model_fields)


@pytest.mark.parametrize(
    ("fields", "sslmode"),
    [
        ({"host": "db.example"}, "verify-full"),
        ({"dsn": "postgresql://db.example/x"}, "verify-full"),
        ({"host": "10.0.0.1"}, "verify-full"),
        ({"host": "localhost,db.example"}, "verify-full"),
        ({"service": "shop"}, "verify-full"),
        ({"host": "localhost"}, "prefer"),
        ({"host": "127.0.0.5"}, "prefer"),
        ({"host": "::1"}, "prefer"),
        ({"host": "/run/postgresql"}, "prefer"),
        ({}, "prefer"),
        ({"host": "db.example", "sslmode": "require"}, "require"),
        ({"dsn": "postgresql://db.example/x?sslmode=disable"}, "disable"),
        ({"host": "localhost", "sslmode": "verify-ca"}, "verify-ca"),
        ({"host": "localhost", "hostaddr": "10.0.0.1"}, "verify-full"),
    ],
)
def test_tls_is_verified_unless_the_server_is_on_this_machine(monkeypatch, fields, sslmode):
    monkeypatch.delenv("PGHOST", raising=False)
    assert options(**fields)["sslmode"] == sslmode


def test_the_environments_host_counts_for_tls(monkeypatch):
    monkeypatch.setenv("PGHOST", "db.example")
    assert options()["sslmode"] == "verify-full"


def test_fields_come_before_the_dsn_and_overrides_before_both():
    found = options(
        dsn="postgresql://a@h/d?application_name=dsn&connect_timeout=7",
        user="b",
        overrides={"dbname": "other"},
    )
    assert (found["user"], found["host"], found["dbname"]) == ("b", "h", "other")
    assert (found["application_name"], found["connect_timeout"]) == ("dsn", "7")


def test_session_options_are_joined_ours_last():
    found = options(options="-c a=1", overrides={"options": "-c b=2"})
    assert found["options"] == "-c a=1 -c b=2"


def test_an_address_names_the_place_and_nothing_else():
    assert PostgresSource(dsn="postgresql://cdc@db.example:6432/shop").address == "db.example:6432/shop"
    assert PostgresSource(host="h", dbname="d", user="secretive").address == "h/d"
