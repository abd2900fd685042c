"""A secret is given by reference, resolved when used, and shown nowhere."""

from __future__ import annotations

import json
import pickle
import string
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict

from tailrace import config
from tailrace.config import PostgresSource, Secret
from tailrace.errors import Kind, TailraceError
from tailrace.secrets import FILE_BYTES_MAX, redact, remember

CANARY = "c4n4ry-S3cret"


@pytest.fixture
def canary(monkeypatch):
    monkeypatch.setenv("CANARY", CANARY)
    return CANARY


def source_of(**given: str) -> PostgresSource:
    return PostgresSource.model_validate(given)


def file_with(directory, source, extra=""):
    file = directory / "pipeline.yaml"
    file.write_text(f"name: shop\nsource:\n{source}log: {{path: ./log}}\n{extra}")
    return file


def problem_of(directory, source, extra=""):
    file = file_with(directory, source, extra)
    with pytest.raises(TailraceError) as caught:
        config.load(file)
    return str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        f"  password: {CANARY}\n",
        f"  password: ['{CANARY}']\n",
        f"  password: {{a: {CANARY}}}\n",
        f"  password: x${{env:{CANARY}\n",
        f"  pasword: {CANARY}\n",
        f"  sslpassword: {CANARY}\n",
        f"  dsn: postgresql://cdc:{CANARY}@db/shop\n",
        f"  dsn: host=db password={CANARY}\n",
        f"  dsn: host=db password='{CANARY}\n",
        f"  dsn: postgresql://cdc:{CANARY}@db:port/shop\n",
        f"  dsn: mysql://cdc:{CANARY}@db/shop\n",
        f"  dsn: postgresql://db/shop?sslpassword={CANARY}\n",
        f"  port: {CANARY}\n",
        f"  snapshot: {CANARY}\n",
        f"  slot: {CANARY}\n",
        f"  host: [{CANARY}]\n",
        f"  host: ${{{CANARY}}}\n",
        f"  tables: ['{CANARY}']\n",
        f"  password: *{CANARY}\n",
        f'  password: "{CANARY}\n',
        f"  password: !{CANARY} x\n",
        f"  password: {CANARY}: {CANARY}\n",
        f"  connect_timeout: {CANARY}\n",
        f"  sslmode: {CANARY}\n",
        f"  frame_bytes_max: {CANARY}\n",
    ],
)
def test_no_error_shows_the_content_of_the_file(tmp_path, source):
    assert CANARY not in problem_of(tmp_path, source)


def test_a_literal_password_is_refused_with_a_hint(tmp_path):
    assert "${env:NAME} or ${file:/path}" in problem_of(tmp_path, "  password: hunter2\n")
    assert "password: ${env:NAME}" in problem_of(tmp_path, "  dsn: postgresql://a:hunter2@b/c\n")


def test_a_model_created_in_python_hides_its_input_too():
    with pytest.raises(ValueError, match="reference") as caught:
        PostgresSource(password=CANARY)  # type: ignore[arg-type]
    assert CANARY not in str(caught.value)


def test_a_loaded_pipeline_shows_only_the_reference(tmp_path, canary):
    pipeline = config.load(
        file_with(
            tmp_path,
            "  host: ${env:CANARY}\n  password: ${env:CANARY}\n",
            "spark: {conf: {spark.key: '${env:CANARY}'}}\n",
        )
    )
    source: Any = pipeline.source
    assert canary in source.conninfo()
    for shown in (
        repr(pipeline),
        str(pipeline),
        pipeline.model_dump_json(),
        repr(pipeline.model_dump()),
        json.dumps(pipeline.model_dump(mode="json")),
        pipeline.source.address,
        pickle.dumps(pipeline).decode("latin-1"),
    ):
        assert canary not in shown
    assert pipeline.spark.settings() == {"spark.key": canary}
    assert pickle.loads(pickle.dumps(pipeline)) == pipeline  # noqa: S301


def test_a_reference_is_resolved_at_each_use(tmp_path, monkeypatch):
    secret = Secret("${env:ROTATED}")
    monkeypatch.setenv("ROTATED", "one")
    assert secret.resolve() == "one"
    monkeypatch.setenv("ROTATED", "two")
    assert secret.resolve() == "two"


def test_the_secret_in_a_file_is_read_without_its_last_newline(tmp_path):
    (tmp_path / "pw").write_text("a b\n")
    assert Secret(f"${{file:{tmp_path}/pw}}").resolve() == "a b"


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"x" * (FILE_BYTES_MAX + 1)])
def test_an_invalid_reference_is_reported(tmp_path, content):
    if content is not None:
        (tmp_path / "pw").write_bytes(content)
    with pytest.raises(TailraceError) as caught:
        Secret(f"${{file:{tmp_path}/pw}}").resolve()
    assert caught.value.kind is Kind.SECRET_MISSING
    assert "pw" in caught.value.message


def test_an_unset_variable_is_reported(monkeypatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(TailraceError) as caught:
        source_of(host="localhost", password="${env:NOT_SET}").conninfo()
    assert caught.value.kind is Kind.SECRET_MISSING
    assert "NOT_SET" in caught.value.message


def test_a_password_may_have_every_printable_character(monkeypatch):
    monkeypatch.setenv("HARD", string.printable.rstrip())
    found = conninfo_to_dict(source_of(dsn="postgresql://u@h/d", password="${env:HARD}").conninfo())
    assert found["password"] == string.printable.rstrip()


def test_a_password_in_a_dsn_may_be_a_reference(monkeypatch):
    monkeypatch.setenv("HARD", "p@ss:/?#%w")
    found = conninfo_to_dict(PostgresSource(dsn="postgresql://u:${env:HARD}@h/d").conninfo())
    assert (found["user"], found["password"], found["host"]) == ("u", "p@ss:/?#%w", "h")


def test_a_whole_dsn_may_be_a_reference(monkeypatch, canary):
    monkeypatch.setenv("URL", f"postgresql://u:{canary}@h:1/d")
    source = PostgresSource(dsn="${env:URL}")
    assert conninfo_to_dict(source.conninfo())["password"] == canary
    assert canary not in source.address
    monkeypatch.setenv("URL", f"http://{canary}")
    with pytest.raises(TailraceError) as caught:
        source.conninfo()
    assert canary not in str(caught.value)


def test_a_resolved_password_is_removed_from_foreign_texts(canary):
    source_of(host="h", password="${env:CANARY}").conninfo()
    assert canary not in redact(f"FATAL: could not use {canary}!")
    remember("ab")
    assert redact("abc") == "abc"
