"""Columns, masks and keys from a real server into every sink, by the command; and what must not show."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable

SALT = "Sa1t-c4n4ry-0123456789"
RAW = ("alice@x", "bob@x", "carol@x", "alice2@x", "555-0", "T0P-SECRET")
LONG = "y" * 4000
TIMEOUT_S = 240


def tailrace(*arguments: Any, check: int = 0, salt: str | None = SALT) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "SALT"}
    done = subprocess.run(
        [sys.executable, "-m", "tailrace", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env=environment | ({} if salt is None else {"SALT": salt}),
    )
    said = done.stdout + done.stderr
    assert done.returncode == check, said
    assert SALT not in said
    return said


def hashed(value: object) -> str:
    return hmac.digest(SALT.encode(), str(value).encode(), hashlib.sha256).hex()


def holding(directory: Path, *texts: str) -> set[str]:
    """Return those of `texts` that any file below `directory` contains."""
    return {
        text
        for path in directory.rglob("*")
        if path.is_file()
        for content in [path.read_bytes()]
        for text in texts
        if text.encode() in content
    }


def mirrored(directory: Path, table: str) -> list[dict[str, Any]]:
    rows = DeltaTable(str(directory / table)).to_pyarrow_table().drop_columns(["_position"]).to_pylist()
    return sorted(rows, key=str)


def pipeline_file(directory: Path, pg: Any) -> Path:
    file = directory / "pipeline.yaml"
    (directory / "events").mkdir()
    (directory / "scratch").mkdir()
    file.write_text(f"""\
name: {pg.name}
source:
  host: 127.0.0.1
  port: {pg.port}
  user: postgres
  dbname: {pg.name}
  columns_exclude: ["public.users.ssn"]
  masks:
    - {{columns: ["public.*.id", "*.*.mail", "public.orders.user_id"], method: hash, salt: "${{env:SALT}}"}}
    - {{columns: ["*.*.phone"], method: truncate, length: 2}}
  message_keys: {{"public.log*": [host, at]}}
log: {{path: ./log}}
sinks:
  - {{type: jsonl, path: ./lines}}
  - {{type: parquet, path: ./files, compression: none}}
  - {{type: delta, mode: append, path: ./append}}
  - {{type: delta, mode: mirror, path: ./mirror}}
spark:
  master: local[2]
  conf:
    spark.eventLog.enabled: true
    spark.eventLog.dir: {(directory / "events").as_uri()}
    spark.eventLog.compress: false
    spark.local.dir: {directory / "scratch"}
""")
    return file


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_masks_columns_and_keys_in_every_sink(pg, tmp_path):
    pg.execute("create table users (id int primary key, mail text, phone text, ssn text, bio text)")
    pg.execute("alter table users alter bio set storage external")
    pg.execute("create table orders (no int primary key, user_id int, mail text)")
    pg.execute("create table log (host text, at int, what text, big text)")
    pg.execute("alter table log replica identity full")
    pg.execute("alter table log alter big set storage external")
    pg.execute("insert into users values (1, 'alice@x', '555-0100', 'T0P-SECRET', %s)", [LONG])
    pg.execute("insert into users values (2, 'bob@x', '555-0101', 'T0P-SECRET', 'short')")
    pg.execute("insert into orders values (10, 1, 'alice@x'), (11, 2, null)")
    pg.execute("insert into log values ('a', 1, 'one', %s), ('b', 1, 'two', 'short')", [LONG])
    # Enough that Spark writes a part: its logs are searched, too.
    pg.execute("create table filler (id int primary key, pad text)")
    pg.execute("insert into filler select n, repeat('x', 400) from generate_series(1, 50000) n")
    file = pipeline_file(tmp_path, pg)
    for salt, kind in ((None, "secret_missing"), ("", "config_invalid")):
        assert kind in tailrace("run", file, check=2, salt=salt)
    assert not (tmp_path / "log").exists()
    assert "ready" in tailrace("check", file)
    tailrace("run", file, "--until-caught-up")
    pg.execute("update users set mail = 'alice2@x', phone = '555-0999' where id = 1")
    pg.execute("update users set id = 7 where id = 2")
    pg.execute("insert into users values (3, 'carol@x', null, 'T0P-SECRET', null)")
    pg.execute("delete from users where id = 3")
    pg.execute("delete from orders where no = 11")
    pg.execute("update log set what = 'uno' where host = 'a'")
    pg.execute("update log set at = 2 where host = 'b'")
    tailrace("run", file, "--until-caught-up")

    mirror = tmp_path / "mirror"
    assert mirrored(mirror, "public.users") == sorted(
        [
            {"id": hashed(1), "mail": hashed("alice2@x"), "phone": "55", "bio": LONG},
            {"id": hashed(7), "mail": hashed("bob@x"), "phone": "55", "bio": "short"},
        ],
        key=str,
    )
    assert mirrored(mirror, "public.orders") == [{"no": 10, "user_id": hashed(1), "mail": hashed("alice@x")}]
    assert mirrored(mirror, "public.log") == [
        {"host": "a", "at": 1, "what": "uno", "big": LONG},
        {"host": "b", "at": 2, "what": "two", "big": "short"},
    ]
    for folder in ("files", "append"):
        rows = ds.dataset(tmp_path / folder / "public.users", exclude_invalid_files=True).to_table()
        assert {name for name in rows.column_names if name[0] != "_"} == {"id", "mail", "phone", "bio"}
        assert sorted(rows["mail"].drop_null().to_pylist()) == sorted(
            hashed(mail) for mail in ("alice@x", "bob@x", "alice2@x", "bob@x", "carol@x")
        )
    lines = [
        json.loads(line)
        for path in (tmp_path / "lines").rglob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert {"before": {"id": hashed(2)}}.items() <= next(
        line for line in lines if line["op"] == "u" and line["before"] and "id" in line["before"]
    ).items()
    # Masked and excluded values are in no file but the log's, and the salt is in none at all.
    for folder in ("lines", "files", "append", "mirror", "events", "scratch"):
        assert holding(tmp_path / folder, *RAW, SALT) == set(), folder
    assert holding(tmp_path / "log", SALT) == set()
    assert any((tmp_path / "events").iterdir())

    shown = tailrace("log", "show", tmp_path / "log", "--table", "public.users", "--json")
    assert json.loads(shown.splitlines()[0])["after"]["id"] == hashed(1)
    assert not any(text in shown for text in RAW)
    assert "secret_missing" in tailrace("log", "show", tmp_path / "log", check=2, salt=None)
    raw = tailrace("log", "show", tmp_path / "log", "--table", "public.users", "--json", "--raw", salt=None)
    assert json.loads(raw.splitlines()[0])["after"]["mail"] == "alice@x"
    assert "T0P-SECRET" not in raw  # the server did not send it

    pg.execute("update users set mail = 'dora@x' where id = 1")
    refused = tailrace("run", file, "--until-caught-up", check=1, salt="another-salt-0123456789")
    assert "sink_schema_refused" in refused
    assert mirrored(mirror, "public.users")[0]["mail"] in (hashed("alice2@x"), hashed("bob@x"))
