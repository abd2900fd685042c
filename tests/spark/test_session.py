"""Java processes that die while Spark starts or later: the next request gets another session."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LIVES = """
import sys
import threading
from tailrace.config.load import from_mapping
from tailrace.errors import TailraceError
from tailrace.pipeline.spark_host import SparkHost
from tailrace.spark import session as module

source = {"type": "postgresql", "dsn": "postgresql://nobody@127.0.0.1:1/none", "tables": ["public.a"]}
shop = {"name": "shop", "source": source, "log": {"path": sys.argv[1]}, "spark": {"master": "local[2]"}}
config = from_mapping(shop)
launch, warm, wanted = module.launch_jvm, module.warm, threading.Event()

def say(what):  # threads log to standard output meanwhile
    with open(sys.argv[2], "a") as file:
        print(str(what).partition("\\n")[0], file=file)

def kill(session):
    java = session.sparkContext._gateway.proc
    java.kill()
    java.wait()

def launch_one_that_dies(settings):
    gateway = launch(settings)
    gateway.proc.kill()
    gateway.proc.wait()
    return gateway

def warm_one_that_dies(session):
    kill(session)
    warm(session)

def count(host):
    try:
        say(host.session(wanted).range(3).count())
    except TailraceError as error:
        say(error)

host = SparkHost(config)
module.launch_jvm = launch_one_that_dies
count(host)
module.launch_jvm, module.warm = launch, warm_one_that_dies
count(host)
module.warm = warm
count(host)
kill(host.session(wanted))
count(host)
kill(host.session(wanted))
other = SparkHost(config)  # as of an engine that runs later in this process
count(other)
other.stop()
try:
    module.session(config.spark.model_copy(update={"master": "nowhere"}))
except TailraceError as error:
    say(error)
"""


@pytest.mark.slow
def test_a_java_process_is_replaced_whenever_it_died(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIVES, str(tmp_path / "log"), str(tmp_path / "said")],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "said").read_text().splitlines()
    assert lines[0] == "spark_failed: start Spark: its Java process has ended with status -9", done.stderr
    assert lines[1].startswith("spark_failed: run a Spark job: ")
    assert lines[2:5] == ["3", "3", "3"]
    assert lines[5].endswith("Could not parse Master URL: 'nowhere'")
