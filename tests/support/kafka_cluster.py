"""A real Kafka broker for the session, started on first use; a new topic name for each test."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from tailrace_servers.kafka import SASL, SASL_TLS, EmbeddedKafka, find_jars
from tests.support.wait import wait_until

#: The shared broker is idle most of the time, when its own background work costs as much as all tests. It is
#: never killed, so its failure need not be noticed soon.
_QUIET = {
    "broker.heartbeat.interval.ms": "2000",
    "broker.session.timeout.ms": "9000",
    "metadata.max.idle.interval.ms": "0",  # no empty records while nothing changes
}

_names = itertools.count(1)
_MECHANISM = "SCRAM-SHA-256"


@dataclass(frozen=True)
class Authority:
    """The authority that signed the broker's certificate, as PEM files."""

    certificate: Path
    stranger: Path  # of another authority
    keystore: Path  # the broker's key and certificate


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """An authority made with openssl for the session."""
    at = tmp_path_factory.mktemp("authority")

    def openssl(*arguments: str | Path) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, cwd=at)

    for name in ("authority", "stranger"):
        openssl("req", "-x509", "-new", "-nodes", "-days", "2", "-subj", f"/CN={name}",
                "-keyout", f"{name}.key", "-out", f"{name}.pem")  # fmt: skip
    openssl("req", "-new", "-nodes", "-subj", "/CN=broker", "-keyout", "broker.key", "-out", "broker.csr")
    (at / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    openssl("x509", "-req", "-in", "broker.csr", "-CA", "authority.pem", "-CAkey", "authority.key",
            "-CAcreateserial", "-days", "2", "-extfile", "names", "-out", "broker.pem")  # fmt: skip
    keystore = at / "keystore.pem"
    keystore.write_text((at / "broker.key").read_text() + (at / "broker.pem").read_text())
    return Authority(at / "authority.pem", at / "stranger.pem", keystore)


@pytest.fixture(scope="session")
def kafka(authority: Authority) -> Iterator[EmbeddedKafka]:
    """A broker that tests share, with secured listeners as well; tests must not kill it."""
    with EmbeddedKafka(find_jars(), settings=_QUIET, keystore=authority.keystore, proxied=True) as cluster:
        yield cluster


@pytest.fixture
def topic_name() -> str:
    """A name that no other test of the session uses."""
    return f"topic-{next(_names)}"


class Principal:
    """A user of the broker, without any permission at first."""

    def __init__(self, kafka: EmbeddedKafka, name: str, password: str) -> None:
        self.name, self.password = name, password
        self._kafka = kafka
        self._admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
        credential = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
        user = UserScramCredentialUpsertion(name, credential, password.encode())
        self._admin.alter_user_scram_credentials([user])[name].result(60)
        wait_until(self._is_let_in, 60, f"the user {name} to be known")

    def options(self, door: str = SASL, password: str | None = None) -> dict[str, Any]:
        """Return the options of a client for a secured listener; by default with the right password."""
        return {
            "security.protocol": "SASL_SSL" if door == SASL_TLS else "SASL_PLAINTEXT",
            "sasl.mechanism": _MECHANISM,
            "sasl.username": self.name,
            "sasl.password": self.password if password is None else password,
        }

    def allow(self, resource: str, name: str, operation: str) -> None:
        """Allow one operation: `allow("topic", "orders", "WRITE")`."""
        binding = self._binding(AclBinding, resource, name, operation)
        (made,) = self._admin.create_acls([binding]).values()
        made.result(60)
        wait_until(lambda: (resource, name, operation) in self.rights, 60, "the ACL")

    def revoke(self, resource: str, name: str, operation: str) -> None:
        """Take back a permission."""
        binding = self._binding(AclBindingFilter, resource, name, operation)
        (gone,) = self._admin.delete_acls([binding]).values()
        gone.result(60)
        wait_until(lambda: (resource, name, operation) not in self.rights, 60, "the end of the ACL")

    @property
    def rights(self) -> set[tuple[str, str, str]]:
        """The present permissions: (resource, name, operation)."""
        anything: Any = None
        wanted = AclBindingFilter(
            ResourceType.ANY, anything, ResourcePatternType.ANY, f"User:{self.name}", anything,
            AclOperation.ANY, AclPermissionType.ANY,
        )  # fmt: skip
        return {
            (acl.restype.name.lower().replace("_", "-"), acl.name, acl.operation.name)
            for acl in self._admin.describe_acls(wanted).result(60)
        }

    def _binding(self, kind: Any, resource: str, name: str, operation: str) -> Any:
        return kind(
            ResourceType[resource.upper().replace("-", "_")], name, ResourcePatternType.LITERAL,
            f"User:{self.name}", "*", AclOperation[operation], AclPermissionType.ALLOW,
        )  # fmt: skip

    def _is_let_in(self) -> bool:
        client = AdminClient(
            {"bootstrap.servers": self._kafka.bootstrap_at(SASL), "log_level": 0, **self.options()}
        )
        with contextlib.suppress(KafkaException):
            client.list_topics(timeout=2)
            return True
        return False


@pytest.fixture
def principal(kafka: EmbeddedKafka) -> Principal:
    """A new user for each test."""
    return Principal(kafka, f"cdc-{next(_names)}", "c4n4ry-S3cret")


def alter(kafka: EmbeddedKafka, topic: str, name: str, value: str) -> None:
    """Set a topic's setting, as `kafka-configs --alter --add-config` does."""
    resource = ConfigResource(ResourceType.TOPIC, topic)
    resource.add_incremental_config(ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET))
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
    admin.incremental_alter_configs([resource])[resource].result(60)
    asked = ConfigResource(ResourceType.TOPIC, topic)
    wait_until(
        lambda: admin.describe_configs([asked])[asked].result(60)[name].value == value, 60, "the broker"
    )
