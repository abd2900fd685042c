"""TLS, authentication and privileges, on a server with TLS: what is refused, and the errors."""

from __future__ import annotations

import pickle
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import structlog

from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import POLICY, Kind, Policy, TailraceError
from tailrace.sources.postgres.connection.session import Session
from tailrace_servers.install import find_install, has_install
from tailrace_servers.postgres import EmbeddedPostgres
from tests.support.capture.captured import CREATE_ITEMS, Running, capturing, make_task, read_log, run_to_end
from tests.support.postgres import SETTINGS
from tests.support.proxy import Direction, Proxy
from tests.support.wait import wait_until

CANARY = "c4n4ry-pässw/rd'@:%"
HBA = """\
local   all all            trust
host    all postgres 127.0.0.1/32 trust
hostssl all certain 127.0.0.1/32 cert
hostssl all cdc 127.0.0.1/32 scram-sha-256
"""


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@dataclass
class Authority:
    """A certificate authority made for the test."""

    directory: Path

    @property
    def certificate(self) -> Path:
        return self.directory / "ca.crt"

    def make(self) -> Authority:
        self.directory.mkdir()
        openssl("req", "-new", "-x509", "-days", "2", "-nodes", "-subj", "/CN=authority", "-keyout",
                self.directory / "ca.key", "-out", self.certificate)  # fmt: skip
        return self

    def issue(self, name: str, *, days: int = 2, alternative: str = "") -> tuple[Path, Path]:
        """Return the files of a certificate for `name`, and of its key."""
        key, request, certificate = (self.directory / f"{name}.{end}" for end in ("key", "csr", "crt"))
        openssl("req", "-new", "-nodes", "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        extension = self.directory / "extension"
        extension.write_text(f"subjectAltName={alternative or 'DNS:' + name}\n")
        openssl("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey",
                self.directory / "ca.key", "-CAcreateserial", "-days", str(days), "-extfile", extension,
                "-out", certificate)  # fmt: skip
        key.chmod(0o600)
        return certificate, key

    def revoke(self, name: str) -> Path:
        """Return the file of a revocation list that has the certificate for `name`."""
        given = self.directory / "ca.cnf"
        (self.directory / "index.txt").touch()
        (self.directory / "number").write_text("01\n")
        given.write_text(
            f"[ca]\ndefault_ca=own\n[own]\ndatabase={self.directory}/index.txt\n"
            f"crlnumber={self.directory}/number\ndefault_md=sha256\ndefault_crl_days=2\n"
        )
        signed = ("ca", "-config", given, "-keyfile", self.directory / "ca.key", "-cert", self.certificate)
        openssl(*signed, "-revoke", self.directory / f"{name}.crt")
        openssl(*signed, "-gencrl", "-out", self.directory / "revoked.crl")
        return self.directory / "revoked.crl"


@dataclass
class Secured:
    """A server with TLS, roles with passwords or certificates, and the authority that both trust."""

    server: EmbeddedPostgres
    authority: Authority

    def present(self, certificate: Path, key: Path) -> None:
        """Let the server use this certificate from its next connection on."""
        for path, name in (
            (certificate, "server.crt"),
            (key, "server.key"),
            (self.authority.certificate, "ca.crt"),
        ):
            target = self.server.data / name
            target.write_bytes(path.read_bytes())
            self.server.own(target)
            target.chmod(0o600)

    def options(self, **changed: Any) -> dict[str, Any]:
        given = {
            "sslmode": "verify-full", "sslrootcert": str(self.authority.certificate),
            "host": "localhost", "hostaddr": "127.0.0.1", "port": self.server.port, "dbname": "postgres",
            "user": "cdc", "password": "${env:CANARY}", "reconnect_s_max": 0.1, **changed,
        }  # fmt: skip
        return {name: value for name, value in given.items() if value is not None}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    if not has_install(15):
        pytest.skip("PostgreSQL 15 is not installed, and the embedded ones are built without TLS")
    authority = Authority(tmp_path_factory.mktemp("tls") / "good").make()
    with EmbeddedPostgres(find_install(15), settings=SETTINGS, durable=False) as server:
        secured = Secured(server, authority)
        secured.present(*authority.issue("localhost"))
        password = CANARY.replace("'", "''")
        server.execute(
            f"create role cdc login replication password '{password}'; create role certain login replication"
        )
        server.execute("grant create on database postgres to cdc, certain")
        server.execute(CREATE_ITEMS)
        server.execute("insert into items values (1, 'x')")
        server.execute("alter table items owner to cdc")
        server.execute("grant cdc to certain")
        server.execute(["alter system set ssl = on", " "][0])
        server.execute("alter system set ssl_ca_file = 'ca.crt'")
        (server.data / "pg_hba.conf").write_text(HBA)
        server.restart()
        yield secured


@pytest.fixture(autouse=True)
def canary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY", CANARY)


def refusal(tmp_path: Path, options: dict[str, Any]) -> TailraceError:
    """Return the error of a failed start; the secret is neither in it nor in the log lines."""
    with structlog.testing.capture_logs() as said:
        error = run_to_end(None, tmp_path / "log", **options)  # type: ignore[arg-type]
    assert error is not None
    for text in (str(error), repr(error), repr(error.args), str(error.as_json()), repr(said)):
        assert CANARY not in text
    assert CANARY.encode() not in pickle.dumps(error)
    return error


def drop_what_was_made(server: EmbeddedPostgres) -> None:
    # A busy server notices the end of a connection a little later.
    wait_until(lambda: not server.query("select 1 from pg_replication_slots where active"), what="its end")
    server.execute("select pg_drop_replication_slot(slot_name) from pg_replication_slots")
    server.execute("drop publication if exists tailrace_t")


@pytest.mark.parametrize(
    "changed",
    [
        {"require_auth": "scram-sha-256", "channel_binding": "require"},
        {"ssl_min_protocol_version": "TLSv1.3"},
        {"user": "certain", "password": None},
    ],
    ids=["scram with channel binding", "tls 1.3", "client certificate"],
)
def test_a_verified_connection_captures_snapshot_and_stream(
    secured: Secured, tmp_path: Path, changed: dict[str, Any]
) -> None:
    if changed.get("user") == "certain":
        certificate, key = secured.authority.issue("certain")
        changed = {**changed, "sslcert": str(certificate), "sslkey": str(key)}
    running = Running(make_task(None, tmp_path / "log", **secured.options(**changed)))  # type: ignore[arg-type]
    running.wait_for("streaming")
    encrypted = secured.server.query(
        "select bool_and(s.ssl) from pg_stat_ssl s join pg_stat_activity a using (pid) "
        "where a.usename <> 'postgres'"
    )
    secured.server.execute("insert into items select max(id) + 1, 'y' from items")
    running.catch_up(secured.server.query)
    running.stop()
    assert encrypted == [(True,)]
    found = read_log(tmp_path / "log")
    assert len(found.inserts) == 1
    for path in (tmp_path / "log").rglob("*"):
        assert not path.is_file() or CANARY.encode() not in path.read_bytes()
    drop_what_was_made(secured.server)


def test_each_refusal_has_its_own_message_and_shows_no_secret(
    secured: Secured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTHER", "an0ther-canary")
    other = Authority(tmp_path / "other").make()
    wrong_client, wrong_key = other.issue("certain")
    client, key = secured.authority.issue("certain")
    encrypted = tmp_path / "encrypted.key"
    openssl("rsa", "-aes256", "-in", key, "-out", encrypted, "-passout", "pass:an0ther-canary")
    encrypted.chmod(0o600)
    revoked = secured.authority.revoke("localhost")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"sslrootcert": str(other.certificate)}, "does not come from the authority"),
        ({"sslrootcert": str(tmp_path / "none.crt")}, "source.sslrootcert"),
        ({"host": "db.example"}, "for another name"),
        ({"sslmode": "disable"}, "pg_hba.conf"),
        ({"user": "certain", "password": None}, "client certificate"),
        ({"user": "certain", "sslcert": str(wrong_client), "sslkey": str(wrong_key)}, "source.sslcert"),
        ({"user": "certain", "sslcert": str(client), "sslkey": str(encrypted)}, "source.sslpassword"),
        ({"user": "certain", "sslcert": str(client), "sslkey": str(wrong_key)}, "source.sslkey its key"),
        ({"sslcrl": str(revoked)}, "was revoked"),
        ({"require_auth": "md5"}, "require_auth"),
        ({"user": "nobody"}, "pg_hba.conf"),
        ({"password": "${env:OTHER}"}, "source.password"),
    ]

    for changed, hint in cases:
        error = refusal(tmp_path, secured.options(**changed))
        assert error.kind is Kind.SOURCE_AUTH_FAILED or not hint, (changed, error)
        assert hint in error.hint, (changed, error)
        assert "an0ther-canary" not in str(error)
    for changed, message, hint in (
        ({"channel_binding": "perhaps"}, "channel_binding", "PostgreSQL's manual"),
        ({"options": "-c no_such=1"}, "no_such", "source.options"),
        ({"host": None}, "host name must be specified", "source.host"),
        # libpq would connect without them.
        ({"sslcrl": "/no/such"}, "source.sslcrl", "source.sslcrl"),
        ({"sslcert": "/no/such"}, "source.sslcert", "source.sslcert"),
        ({"password": None, "passfile": "/no/such"}, "source.passfile", "source.passfile"),
    ):
        error = refusal(tmp_path, secured.options(**changed))
        assert error.kind is Kind.SOURCE_MISCONFIGURED, error
        assert message in error.message
        assert hint in error.hint
    # A certificate that has expired.
    secured.present(*secured.authority.issue("localhost", days=0))
    secured.server.restart()
    try:
        made = time.time()  # it is valid for no time at all, in whole seconds
        wait_until(lambda: time.time() > made + 1, 60, "the certificate to run out")
        assert "out of date" in refusal(tmp_path, secured.options()).hint
    finally:
        secured.present(*secured.authority.issue("localhost"))
        secured.server.restart()
    # No TLS on the server: nothing is sent in plain text.
    secured.server.execute("alter system set ssl = off")
    secured.server.restart()
    try:
        error = refusal(tmp_path, secured.options())
        assert "ssl = on" in error.hint
    finally:
        secured.server.execute("alter system set ssl = on")
        secured.server.restart()


@pytest.mark.parametrize("direction", ["to_client", "to_server"])
@pytest.mark.parametrize("version", ["TLSv1.2", "TLSv1.3"])
def test_a_connection_that_breaks_in_the_handshake_is_source_unreachable(
    secured: Secured, proxy: Callable[[int], Proxy], version: str, direction: Direction
) -> None:
    between = proxy(secured.server.port)
    source = PostgresSource(
        tables=("public.items",),
        **secured.options(port=between.port, ssl_max_protocol_version=version, gssencmode="disable"),
    )
    kinds, after = set(), 0
    while True:
        between.cut_after(after, direction)
        try:
            Session.connect(source, threading.Event(), replication=True).close()
        except TailraceError as error:
            kinds.add(error.kind)
        else:
            break
        after += 1 if after < 12 else 53
    assert kinds == {Kind.SOURCE_UNREACHABLE}
    assert after > 500
    assert POLICY[Kind.SOURCE_UNREACHABLE] is Policy.RETRY


def test_broken_handshakes_are_retried(
    secured: Secured, proxy: Callable[[int], Proxy], tmp_path: Path
) -> None:
    between = proxy(secured.server.port)
    options = secured.options(port=between.port, reconnect_s_max=60)
    try:
        with capturing(None, tmp_path / "log", **options) as running:  # type: ignore[arg-type]
            running.wait_for("streaming")
            for number, after in enumerate((30, 900, 2000), start=1):
                between.cut_after(after)  # of the next handshake, once the connections are gone
                reset = running.task.progress().reconnects
                secured.server.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity where usename = 'cdc'"
                )
                wait_until(
                    lambda: running.task.progress().reconnects > reset,  # noqa: B023
                    60,
                    "the connection to break",
                )
                secured.server.execute(f"insert into items values ({1000 + number}, 'y')")
                running.catch_up(secured.server.query, 60)
    finally:
        secured.server.execute("delete from items where id > 1000")
        drop_what_was_made(secured.server)
    assert read_log(tmp_path / "log").inserts == [1001, 1002, 1003]


def test_privileges_lost_while_running_stop_the_next_connection_with_their_names(
    secured: Secured, tmp_path: Path
) -> None:
    server = secured.server
    password = CANARY.replace("'", "''")
    for lose, back, hint in (
        ("alter role cdc noreplication", "alter role cdc replication", "REPLICATION"),
        ("alter role cdc password 'changed'", f"alter role cdc password '{password}'", "source.password"),
        ("alter role cdc nologin", "alter role cdc login", "LOGIN"),
        (
            "alter database postgres connection limit 0",
            "alter database postgres connection limit -1",
            "LIMIT",
        ),
    ):
        running = Running(make_task(None, tmp_path / "log", **secured.options()))  # type: ignore[arg-type]
        running.wait_for("streaming")
        server.execute(lose)
        server.execute("select pg_terminate_backend(pid) from pg_stat_replication")
        running.join(60)
        server.execute(back)
        assert isinstance(running.error, TailraceError)
        assert hint in running.error.hint, running.error
        assert CANARY not in str(running.error)
    drop_what_was_made(server)
