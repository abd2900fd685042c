"""Each form of the join at a broker with authentication and TLS; no secret is printed or stored anywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tailrace
from tailrace.errors import Kind, TailraceError
from tailrace_servers.kafka import SASL_TLS, EmbeddedKafka
from tests.support.join.spark_stream import options_of
from tests.support.kafka.debezium_topics import JoinTopics
from tests.support.kafka_cluster import Authority, Principal
from tests.support.wait import wait_until

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 240
#: The password of the fixture `principal`.
CANARY = "c4n4ry-S3cret"


@pytest.fixture
def topics(kafka: EmbeddedKafka, topic_name: str, principal: Principal, join_seed: int) -> JoinTopics:
    """Topics that the principal may read."""
    topics = JoinTopics(kafka, topic_name, join_seed, keys_are_json=True)
    topics.snapshot(5)
    topics.write(20)
    for topic in (*topics.data, topics.transactions):
        principal.allow("topic", topic, "READ")
    return topics


def guarded(principal: Principal, certificate: Path | str) -> dict[str, Any]:
    """Return the client's options."""
    return {
        **principal.options(SASL_TLS, password="${env:CANARY}"), "ssl.ca.location": str(certificate)
    }  # fmt: skip


def file_of(topics: JoinTopics, directory: Path, options: dict[str, Any]) -> Path:
    """Write a pipeline that joins through the secured listener."""
    directory.mkdir()
    source = topics.settings(bootstrap_servers=topics.kafka.bootstrap_at(SASL_TLS), options=options)
    content = {
        "name": topics.name, "source": {"type": "kafka-join", **source}, "log": {"path": "./log"},
        "sinks": [{"type": "jsonl", "path": "./lines"}],
    }  # fmt: skip
    (file := directory / "joined.yaml").write_text(json.dumps(content))
    return file


def said_by(*command: object, status: int | None = 0, password: str | None = CANARY) -> str:
    """Run a program; return all its output, with that of librdkafka and Spark."""
    environment = {name: value for name, value in os.environ.items() if name != "CANARY"}
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False, timeout=WAIT_S, cwd=ROOT,
        env=environment if password is None else environment | {"CANARY": password},
    )  # fmt: skip
    assert status is None or done.returncode == status, done.stdout
    return done.stdout


def require_silence(directory: Path, *said: str) -> None:
    """Check that the secret is in nothing that was written or printed."""
    assert not [words for words in said if CANARY in words]
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if CANARY.encode() in path.read_bytes()]


@pytest.mark.slow
def test_tailrace_run_joins_over_tls_and_reports_what_is_wrong(
    topics: JoinTopics, authority: Authority, principal: Principal, tmp_path: Path
) -> None:
    def file(directory: str, certificate: Path | str) -> Path:
        return file_of(topics, tmp_path / directory, guarded(principal, certificate))

    right, said = file("right", authority.certificate), []
    said.append(said_by("tailrace", "check", right))
    assert "ready" in said[-1]
    said.append(said_by("tailrace", "--verbose", "--debug", "run", right, "--until-caught-up"))
    rows = [
        json.loads(line)["after"]
        for path in (tmp_path / "right" / "lines").rglob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    found = sorted((row["id"], int(row["number"])) for row in rows)
    assert found == sorted((key, number) for key, of in topics.expected.items() for number, _ in of)
    shown = ("status", right), ("status", right, "--json"), ("log", "show", right.parent / "log")
    said += [said_by("tailrace", *command) for command in shown]

    commands: list[tuple[str, ...]] = [("check",), ("--verbose", "--debug", "run")]
    for command in commands:
        stranger = file(f"stranger{len(command)}", authority.stranger)
        said.append(said_by("tailrace", *command, stranger, status=None))
        assert "sink_refused" in said[-1]
        assert "certificate" in said[-1]
        said.append(said_by("tailrace", *command, right, status=None, password=f"wrong-{CANARY}"))
        assert "sink_refused" in said[-1]
        assert "sasl" in said[-1]
        said.append(said_by("tailrace", *command, right, status=2, password=None))
        assert "secret_missing" in said[-1]
    principal.revoke("topic", topics.data[1], "READ")
    said.append(said_by("tailrace", "check", right, status=None))
    assert topics.data[1] in said[-1]
    assert "allow READ" in said[-1]
    require_silence(tmp_path, *said)


def test_the_connector_joins_over_tls_and_reports_what_is_wrong(
    topics: JoinTopics, authority: Authority, principal: Principal, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("CANARY", CANARY)
    got: list[Any] = []

    def engine(certificate: Path) -> tailrace.Engine:
        settings = topics.settings(
            bootstrap_servers=topics.kafka.bootstrap_at(SASL_TLS),
            options=guarded(principal, certificate),
        )
        return tailrace.Engine(
            connector="kafka-join", settings=settings, name="guarded", tasks_max=2, on_batch=got.extend,
            options={"offset_storage": {"type": "file", "path": str(tmp_path / "offsets")}},
        )  # fmt: skip

    total, said = sum(map(len, topics.expected.values())), []
    with engine(authority.certificate) as running:
        wait_until(lambda: len(got) >= total or running.error, WAIT_S, "all changes")
        assert running.error is None
        said += [repr(running.view()), running.metrics.text(), repr(running)]
    assert len(got) == total
    with pytest.raises(TailraceError, match="certificate") as caught:
        engine(authority.stranger).run()
    assert caught.value.kind is Kind.SINK_REFUSED
    said += [str(caught.value.as_json()), repr(caught.value.__cause__)]
    monkeypatch.setenv("CANARY", f"wrong-{CANARY}")
    with pytest.raises(TailraceError, match=r"(?i)sasl|credentials") as caught:
        engine(authority.certificate).run()
    assert caught.value.kind is Kind.SINK_REFUSED
    said += [str(caught.value.as_json()), repr(caught.value.__cause__)]
    monkeypatch.delenv("CANARY")
    with pytest.raises(TailraceError) as caught:
        engine(authority.certificate).run()
    assert caught.value.kind is Kind.SECRET_MISSING
    require_silence(tmp_path, *said, *capfd.readouterr())


@pytest.mark.slow
def test_spark_joins_over_tls_and_no_secret_is_in_plans_offsets_and_logs(
    topics: JoinTopics, authority: Authority, principal: Principal, tmp_path: Path
) -> None:
    # A query's progress is stored in a consumer group.
    principal.allow("group", "*", "READ")
    for folder in ("rows", "events", "wrong"):
        (tmp_path / folder).mkdir()

    def given(out: str) -> str:
        client = guarded(principal, authority.certificate)
        options = options_of(topics, maxOffsetsPerTrigger=100) | {
            "bootstrapServers": topics.kafka.bootstrap_at(SASL_TLS),
            **{f"kafka.{name}": str(value) for name, value in client.items()},
        }
        conf = {
            "spark.eventLog.enabled": "true", "spark.eventLog.compress": "false",
            "spark.eventLog.dir": f"file://{tmp_path / 'events'}",
        }  # fmt: skip
        return json.dumps({
            "options": options, "out": str(tmp_path / out), "checkpoint": str(tmp_path / f"checkpoint-{out}"),
            "kill_when": "", "conf": conf,
        })  # fmt: skip

    process = "tests.support.join.spark_process"
    said = [said_by(process, given("rows"))]
    rows = [
        json.loads(line)
        for path in (tmp_path / "rows").iterdir()
        for line in path.read_text().splitlines()
    ]  # fmt: skip
    found: dict[str, list[tuple[int, str]]] = {}
    for row in sorted(rows, key=lambda each: each[:3]):
        found.setdefault(json.loads(row[3])["id"], []).append((row[4], row[5]))
    assert found == topics.expected
    topics.write(5)
    said.append(said_by(process, given("wrong"), status=1, password=f"wrong-{CANARY}"))
    assert "sink_refused" in said[-1]
    said.append(said_by(process, given("wrong"), status=1, password=None))
    assert "secret_missing" in said[-1]
    plans = "".join(path.read_text() for path in (tmp_path / "events").rglob("*") if path.is_file())
    assert "physicalPlanDescription" in plans
    require_silence(tmp_path, *said)
