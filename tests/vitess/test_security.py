"""A vtgate that requires TLS, a client certificate and a user: what is accepted, and the errors."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tailrace.config.source.vitess import VitessSource
from tailrace.errors import Kind, TailraceError
from tailrace.sources.vitess.connection.metadata import serving_shards
from tailrace.sources.vitess.connection.vtgate import Vtgate
from tailrace_servers.vitess import EmbeddedVitess, find_vitess
from tests.support.kafka_cluster import Authority

pytestmark = pytest.mark.vitess


@dataclass(frozen=True)
class Guarded:
    """The cluster, and the settings of a source that it accepts."""

    cluster: EmbeddedVitess
    settings: dict[str, object]


@pytest.fixture(scope="module")
def guarded(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    made = authority.certificate.parent
    at = tmp_path_factory.mktemp("guarded")
    for command in (
        ("req", "-new", "-nodes", "-subj", "/CN=tailrace", "-keyout", at / "own.key", "-out", at / "own.csr"),
        ("x509", "-req", "-in", at / "own.csr", "-CA", "authority.pem", "-CAkey", "authority.key",
         "-CAcreateserial", "-days", "2", "-out", at / "own.pem"),
    ):  # fmt: skip
        subprocess.run(["openssl", *map(str, command)], check=True, capture_output=True, cwd=made)
    (at / "password").write_text("secret of tests\n")
    with EmbeddedVitess(find_vitess(), shards=("0",)) as cluster:
        for name in ("authority.pem", "broker.pem", "broker.key"):
            (cluster.directory / name).write_bytes((made / name).read_bytes())
        users = [{"Username": "cdc", "Password": "secret of tests"}]
        (cluster.directory / "users.json").write_text(json.dumps(users))
        for path in cluster.directory.glob("*.*"):
            path.chmod(0o644)
        cluster.kill_vtgate()
        inside = str(cluster.directory)
        cluster.start_vtgate(
            *("--grpc_cert", f"{inside}/broker.pem", "--grpc_key", f"{inside}/broker.key"),
            *("--grpc_ca", f"{inside}/authority.pem"),
            *("--grpc_auth_mode", "static", "--grpc_auth_static_password_file", f"{inside}/users.json"),
        )
        settings = {
            "hosts": [cluster.address],
            "keyspace": cluster.keyspace,
            "connect_timeout": 3,
            "tls_ca": str(authority.certificate),
            "tls_certificate": str(at / "own.pem"),
            "tls_key": str(at / "own.key"),
            "user": "cdc",
            "password": f"${{file:{at / 'password'}}}",
        }
        yield Guarded(cluster, settings)


def _asked(settings: dict[str, object]) -> tuple[str, ...]:
    source = VitessSource.model_validate(settings)
    vtgate = Vtgate.connect(source)
    try:
        return serving_shards(vtgate, source)
    finally:
        vtgate.close()


def test_a_client_with_everything_required_is_accepted(guarded: Guarded) -> None:
    assert _asked(guarded.settings) == ("0",)


@pytest.mark.parametrize(
    ("taken_out", "kind"),
    [
        (("tls_ca", "tls_certificate", "tls_key"), Kind.SOURCE_UNREACHABLE),
        (("tls_certificate", "tls_key"), Kind.SOURCE_UNREACHABLE),
        (("user", "password"), Kind.SOURCE_AUTH_FAILED),
    ],
)
def test_a_client_that_lacks_something_gets_an_error(
    guarded: Guarded, taken_out: tuple[str, ...], kind: Kind
) -> None:
    settings = {name: value for name, value in guarded.settings.items() if name not in taken_out}
    with pytest.raises(TailraceError) as refused:
        _asked(settings)
    assert refused.value.kind is kind, refused.value


def test_a_wrong_password_is_reported_without_it(
    guarded: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VTGATE_PASSWORD", "another one")
    with pytest.raises(TailraceError) as refused:
        _asked({**guarded.settings, "password": "${env:VTGATE_PASSWORD}"})
    assert refused.value.kind is Kind.SOURCE_AUTH_FAILED
    assert "another one" not in str(refused.value)


def test_a_server_with_another_certificate_is_refused(guarded: Guarded, authority: Authority) -> None:
    with pytest.raises(TailraceError) as refused:
        _asked({**guarded.settings, "tls_ca": str(authority.stranger)})
    assert refused.value.kind is Kind.SOURCE_UNREACHABLE
    assert "CERTIFICATE_VERIFY_FAILED" in refused.value.message
