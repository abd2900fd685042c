"""How the options in the file become those of libpq."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict

from tailrace.config import PostgresSource
from tailrace.config.document import Document
from tailrace.config.load import from_mapping, validate
from tailrace.config.source.libpq import OWN_OPTIONS, secret_options
from tailrace.secrets import REFUSAL, Secret


def options(**fields):
    overrides = fields.pop("overrides", {})
    return conninfo_to_dict(PostgresSource(**fields).conninfo(**overrides))


def test_every_option_of_libpq_may_be_given_by_its_name(tmp_path):
    for option in pq.Conninfo.get_defaults():
        name = option.keyword.decode()
        if name in OWN_OPTIONS:
            continue
        if name in secret_options():
            (tmp_path / name).write_text("hidden")
            given: Any = f"${{file:{tmp_path / name}}}"
            expected = "hidden"
        else:
            given = {"port": 1, "connect_timeout": 7, "sslmode": "disable"}.get(name, "/x")
            expected = str(given)
        assert options(**{name: given})[name] == expected, name


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("sslrootcertt", "x", "unknown key; did you mean 'sslrootcert'?"),
        ("sslpassword", "secret", REFUSAL),
        ("oauth_client_secret", 5, REFUSAL),
        ("require_auth", ["x"], "must be text: put it in quotes"),
        ("client_encoding", "latin1", "can't be set: capture reads UTF-8"),
        ("sslkeylogfile", "keys", "can't be set: everyone who can read the file can read the connection"),
        ("sslcert", "https://x/y", "must be a path on a local or mounted file system, not a URL"),
        ("options", "${vault:x}", None),
    ],
)
def test_an_invalid_option_is_refused_together_with_all_other_problems(tmp_path, option, value, message):
    content = {"name": "shop", "log": {"path": "log"}, "source": {"port": "high", option: value}}
    found, problems = validate(Document(content, {("source", option): 7}), tmp_path)
    assert found is None
    assert {problem.place for problem in problems} == {"source.port", f"source.{option}"}
    (problem,) = (each for each in problems if each.place == f"source.{option}")
    assert problem.line == 7
    assert message is None or problem.message == message


def test_options_keep_references_paths_and_libpqs_numbers(tmp_path):
    content = {
        "name": "shop",
        "log": {"path": "log"},
        "source": {"sslsni": False, "keepalives_idle": 9, "sslcert": "c.crt", "sslpassword": "${env:KEY}"},
    }
    found, problems = validate(Document(content, {}), tmp_path)
    assert not problems
    assert found is not None
    again = from_mapping(found.as_settings(), tmp_path)
    for config in (found, again):
        source = config.source
        assert (source.option("sslsni"), source.option("keepalives_idle")) == ("0", "9")
        assert source.option("sslcert") == str(tmp_path / "c.crt")
        assert source.option("sslpassword") == Secret("${env:KEY}")
        assert source.option("krbsrvname") is None


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
    for name in ("PGHOST", "PGHOSTADDR", "PGSERVICE"):
        monkeypatch.delenv(name, raising=False)
    assert options(**fields)["sslmode"] == sslmode


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({}, "PGHOST", "db.example"),
        ({}, "PGHOSTADDR", "10.0.0.1"),
        ({"host": "localhost"}, "PGHOSTADDR", "10.0.0.1"),
        ({"host": "db.example"}, "PGHOSTADDR", "127.0.0.1"),
        ({}, "PGSERVICE", "shop"),
    ],
)
def test_the_environments_host_counts_for_tls(monkeypatch, fields, name, value):
    monkeypatch.setenv(name, value)
    assert options(**fields)["sslmode"] == "verify-full"


def test_fields_override_the_dsn_and_overrides_override_both():
    found = options(
        dsn="postgresql://a@h/d?application_name=dsn&connect_timeout=7",
        user="b",
        overrides={"dbname": "other"},
    )
    assert (found["user"], found["host"], found["dbname"]) == ("b", "h", "other")
    assert (found["application_name"], found["connect_timeout"]) == ("dsn", "7")


@pytest.mark.parametrize(
    ("fields", "attributes"),
    [
        ({"host": "a,b"}, "primary"),
        ({"dsn": "postgresql://a:1,b:2/d"}, "primary"),
        ({"dsn": "postgresql://a,b/d?target_session_attrs=standby"}, "standby"),
        ({"host": "a"}, None),
    ],
)
def test_of_several_hosts_the_primary_is_meant(fields, attributes):
    assert options(**fields).get("target_session_attrs") == attributes


def test_defaults_of_a_connection_come_last():
    fields = {"dsn": "postgresql://h/d?keepalives_idle=5", "tcp_user_timeout": "7"}
    defaults = {"keepalives_idle": "30", "tcp_user_timeout": "60000", "keepalives": "1"}
    found = conninfo_to_dict(PostgresSource.model_validate(fields).conninfo(defaults))
    assert {name: found[name] for name in defaults} == {
        "keepalives_idle": "5", "tcp_user_timeout": "7", "keepalives": "1",
    }  # fmt: skip


def test_an_encrypted_key_is_an_error_and_no_question_at_the_terminal(tmp_path):
    assert options(sslkey="x.key")["sslpassword"]
    (tmp_path / "phrase").write_text("hidden")
    assert options(sslpassword=f"${{file:{tmp_path}/phrase}}")["sslpassword"] == "hidden"


def test_session_options_are_joined_with_ours_last():
    found = options(options="-c a=1", overrides={"options": "-c b=2"})
    assert found["options"] == "-c a=1 -c b=2"


def test_an_address_has_host_port_and_database_only():
    assert PostgresSource(dsn="postgresql://cdc@db.example:6432/shop").address == "db.example:6432/shop"
    assert PostgresSource(host="h", dbname="d", user="secretive").address == "h/d"
