"""Kafka written by Spark's tasks: the records, tasks that die, and commands that are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tailrace.converters.debezium import JsonConverter
from tailrace.errors import Kind, TailraceError
from tailrace_servers.kafka import SASL, EmbeddedKafka
from tests.support.kafka.folding import _changes, _folded
from tests.support.kafka.reading import read_topic
from tests.support.kafka.shares_rig import alone, content, fill, opened, records, sink_of, unordered, write
from tests.support.kafka_cluster import Principal
from tests.support.postgres import Database
from tests.support.spark.wire import HandmadeLog, insert

TIMEOUT_S = 280
CANARY = "c4n4ry-S3cret"  # the password of `principal`


@pytest.fixture
def log(tmp_path: Path) -> Iterator[HandmadeLog]:
    with HandmadeLog(tmp_path / "log") as written:
        yield written


@pytest.mark.ci
def test_tasks_write_the_same_as_this_process_and_their_errors_are_reported(
    kafka: EmbeddedKafka, topic_name: str, log: HandmadeLog, spark: Any
) -> None:
    ends = fill(log, 6)

    class Refusing(JsonConverter):
        def convert(self, group: Any) -> Any:
            raise TailraceError(Kind.DECODE_FAILED, "decode for a test", "nothing")

    sink = opened(sink_of(kafka, topic_name, 2, converter=Refusing(schemas_enable=False)), log)
    with pytest.raises(TailraceError) as refused:
        write(sink, log, ends[1], spark)
    assert (refused.value.kind, refused.value.hint) == (Kind.DECODE_FAILED, "nothing")
    assert refused.value.context["table"] in {"public.orders", "public.notes"}
    sink.close()
    sink = opened(sink_of(kafka, topic_name, 2), log)
    write(sink, log, ends[3], spark)
    commit = write(sink, log, ends[5], spark)
    assert commit.rows >= 2 * 14
    sink.close()
    assert unordered(content(kafka, topic_name)) == alone(kafka, topic_name, log, ends[5])


def test_a_record_too_large_for_its_topic_is_reported_with_its_position_or_becomes_a_dead_letter(
    kafka: EmbeddedKafka, topic_name: str, log: HandmadeLog, spark: Any
) -> None:
    (end,) = fill(log, 1)
    large = [log.commit(insert(1, 100 + n, "x" * 5000), insert(1, 200 + n, "small")) for n in range(2)]
    settings = [{"tables": ["*.*"], "partitions": 3, "settings": {"max.message.bytes": "2000"}}]
    sink = opened(sink_of(kafka, topic_name, 2, topics=settings), log)
    write(sink, log, end, spark)
    with pytest.raises(TailraceError) as refused:
        write(sink, log, large[0], spark)
    sink.close()
    assert refused.value.kind is Kind.SINK_RECORD_TOO_LARGE
    place = refused.value.context
    assert (place["table"], place["topic"]) == ("public.orders", f"{topic_name}.public.orders")
    assert end <= int(str(place["log_offset"])) < large[0]
    assert place["commit_lsn"]
    assert "set dead_letter_topic" in refused.value.hint
    sink = opened(
        sink_of(kafka, topic_name, 2, topics=settings, dead_letter_topic=f"{topic_name}.dead-letter"), log
    )
    assert write(sink, log, large[1], spark).dead_letters == 2
    sink.close()
    letters = read_topic(kafka.bootstrap, f"{topic_name}.dead-letter")
    assert sorted(letter.key_document["id"] for letter in letters) == [100, 101]
    assert place["log_offset"] in {int(letter.headers["tailrace.log_offset"]) for letter in letters}
    found = content(kafka, topic_name)["public.orders"]
    assert all(f'{{"id":{200 + n}}}' in found and f'{{"id":{100 + n}}}' not in found for n in range(2))


@pytest.mark.slow
def test_a_task_that_dies_is_repeated_by_spark_and_writes_nothing_twice(
    kafka: EmbeddedKafka, topic_name: str, log: HandmadeLog, tmp_path: Path
) -> None:
    ends = fill(log, 6)
    command = [
        sys.executable,
        "-m",
        "tests.support.kafka.spark_once",
        kafka.bootstrap,
        topic_name,
        str(log.path),
    ]
    path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [*command, str(ends[-1]), str(tmp_path / "died")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) >= 6 * 14
    assert sorted(found.name for found in tmp_path.glob("died.*")) == ["died.0", "died.1"]
    assert unordered(content(kafka, topic_name)) == alone(kafka, topic_name, log, ends[-1])


def _run(file: Path, failpoints: str = "", status: int = 0) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tailrace", "--verbose", "run", str(file), "--until-caught-up"],
        capture_output=True, text=True, check=False, timeout=TIMEOUT_S,
        env={**os.environ, "TAILRACE_FAILPOINTS": failpoints, "CANARY": CANARY},
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    # It includes executors' logs.
    assert CANARY not in done.stdout + done.stderr


def _file(directory: Path, pg: Database, kafka: EmbeddedKafka, producers: int, principal: Principal) -> Path:
    file = directory / "pipeline.yaml"
    events = directory / "spark-events"
    events.mkdir(exist_ok=True)
    options = principal.options(SASL, password="${env:CANARY}")
    where = f"runs_on: spark, producers: {producers}" if producers else "runs_on: process"
    file.write_text(
        f"name: {pg.name}\n"
        f"source: {{type: postgresql, dsn: '{pg.dsn}', tables: ['public.*']}}\n"
        "log: {path: ./log}\n"
        # What Spark's user interface and its history show: settings, plans, jobs, tasks, failures.
        f"spark: {{master: 'local[2]', conf: {{spark.eventLog.enabled: 'true', "
        f"spark.eventLog.compress: 'false', spark.eventLog.dir: 'file://{events}'}}}}\n"
        "sinks:\n"
        f"  - {{type: kafka, bootstrap_servers: '{kafka.bootstrap_at(SASL)}', topic_prefix: {pg.name},\n"
        f"     options: {json.dumps(options)},\n"
        f"     group: {pg.name}, offsets_topic: {pg.name}-offsets, {where},\n"
        "     atomic_source_offset_commit: true,\n"
        "     converter: {type: json, schemas_enable: false},\n"
        "     topics: [{tables: ['public.orders'], partitions: 3}]}\n"
    )
    return file


#: For each run: the number of producers (0: in process), and where the command dies, if it does.
LIVES = (
    (2, "kafka.after_head=kill"),
    (2, ""),
    (3, "kafka.after_fence=kill@2"),
    (3, "kafka.after_head=kill@2"),
    (0, "kafka.after_head=kill"),
    (0, "kafka.before_commit=kill@2"),
    (2, "sink.before_write=kill"),
    (1, ""),
)


def _lives(
    pg: Database,
    kafka: EmbeddedKafka,
    principal: Principal,
    directory: Path,
    lives: tuple[tuple[int, str], ...],
) -> None:
    # Exactly the rights in the table of docs/kafka.md.
    for operation in ("READ", "WRITE", "DESCRIBE_CONFIGS", "CREATE"):
        principal.allow("topic", f"{pg.name}-offsets", operation)
    for operation in ("WRITE", "CREATE"):
        principal.allow("topic", f"{pg.name}.public.orders", operation)
    for producer in ("", *(f":{number}" for number in range(max(producers for producers, _ in lives)))):
        principal.allow("transactional-id", f"{pg.name}-{pg.name}-0{producer}", "WRITE")
    pg.execute("create table orders (id int primary key, what text)")
    pg.execute("insert into orders select n, 'first ' || n from generate_series(1, 100) n")
    expected = {("r", n, f"first {n}"): 1 for n in range(1, 101)}
    for turn, (producers, failpoints) in enumerate(lives, 1):
        _run(
            _file(directory, pg, kafka, producers, principal),
            failpoints,
            -signal.SIGKILL if failpoints else 0,
        )
        pg.execute(f"update orders set what = 'turn {turn}' where id <= 30")
        pg.execute(f"insert into orders select n, 'new' from generate_series({turn}001, {turn}040) n")
        expected |= {("u", n, f"turn {turn}"): 1 for n in range(1, 31)}
        expected |= {("c", turn * 1000 + n, "new"): 1 for n in range(1, 41)}
    _run(_file(directory, pg, kafka, lives[-1][0], principal))
    left = [path for path in directory.rglob("*") if path.is_file()]
    told = b"".join(path.read_bytes() for path in left if "spark-events" in path.parts)
    assert all(event in told for event in (b"SparkListenerEnvironmentUpdate", b"SparkListenerTaskEnd"))
    assert not [path for path in left if CANARY.encode() in path.read_bytes()]
    events = [
        (json.loads(key or b""), None if value is None else json.loads(value))
        for key, value in records(kafka, f"{pg.name}.public.orders")
    ]
    assert _changes(events) == expected
    assert _folded(events) == dict(pg.query("select id, what from orders"))


@pytest.mark.ci
def test_after_a_kill_on_spark_the_command_continues_with_another_number_of_producers(
    pg: Database, kafka: EmbeddedKafka, principal: Principal, tmp_path: Path
) -> None:
    _lives(pg, kafka, principal, tmp_path, ((2, "kafka.after_head=kill"), (3, "")))


@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_a_command_may_be_killed_anywhere_in_a_change_of_the_number_of_producers(
    pg: Database, kafka: EmbeddedKafka, principal: Principal, tmp_path: Path
) -> None:
    _lives(pg, kafka, principal, tmp_path, LIVES)
