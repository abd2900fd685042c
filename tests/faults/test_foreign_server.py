"""`tailrace run` with a YAML file, on servers that this project neither started nor configured."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tailrace_servers.install import find_install, has_install, is_reachable, server_account, within_reach
from tests.support.faults.foreign import ROLE, ROLE_PASSWORD, ForeignServer, foreign_server
from tests.support.torture import ledger, validator


@pytest.fixture(params=[15, 18], ids=lambda version: f"pg{version}")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ForeignServer]:
    version = request.param
    if not has_install(version):
        pytest.skip(f"PostgreSQL {version} is not installed")
    account = server_account()
    base = Path("/tmp") if account is not None else tmp_path_factory.getbasetemp()  # noqa: S108
    directory = base / f"foreign-{version}-{os.getpid()}"
    binaries = within_reach(find_install(version), account, base).bin
    assert is_reachable(base, account)
    with foreign_server(version, binaries, directory, account) as server:
        yield server


@pytest.mark.slow
def test_an_ordinary_role_and_a_yaml_file_are_enough(server: ForeignServer, tmp_path: Path) -> None:
    # GIVEN a foreign database, and a role that may only replicate and read
    ledger.create(server.dsn)
    server.execute(
        f"create role {ROLE} with login replication password '{ROLE_PASSWORD}';"
        f"grant create on database postgres to {ROLE};"
        f"grant usage on schema public to {ROLE}; grant select on all tables in schema public to {ROLE};"
        # the tables' owner, or a role that the owner trusts, creates the publication
        "create publication tailrace_foreign for all tables"
    )
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "name": "foreign",
                "source": {
                    "type": "postgresql", "host": "127.0.0.1", "port": server.port, "user": ROLE,
                    "password": "${env:FOREIGN_PASSWORD}", "dbname": "postgres",
                },
                "log": {"path": "log"},
                "sinks": [{"type": "parquet", "path": "lake"}],
                "spark": {"master": "local[2]", "conf": {"spark.ui.enabled": "false"}},
            }
        )
    )  # fmt: skip
    workload = ledger.Workload(server.dsn, seed=3)
    workload.burst(100)
    outputs = []

    def tailrace(*words: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "tailrace", *words, str(file)], capture_output=True, text=True,
            check=False, timeout=240, env={**os.environ, "FOREIGN_PASSWORD": ROLE_PASSWORD},
        )  # fmt: skip
        outputs.append(done.stdout + done.stderr)
        return done

    # WHEN the pipeline is checked and run, twice, with changes in between
    checked = tailrace("check")
    assert checked.returncode == 0, outputs[-1]
    assert tailrace("run", "--until-caught-up").returncode == 0, outputs[-1]
    workload.burst(100)
    assert tailrace("run", "--until-caught-up").returncode == 0, outputs[-1]
    workload.stop()
    # THEN the lake has everything once, and no output shows the password
    assert validator.problems("parquet", tmp_path / "lake", server.dsn) == []
    assert all(ROLE_PASSWORD not in output for output in outputs)
