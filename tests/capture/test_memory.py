"""The memory limits of the capturing process and of a task that writes files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tests.support.capture.captured import NAME, read_log
from tests.support.capture.requested import is_over, request
from tests.support.postgres import Database

#: Captures until its input ends. For each LSN on its input it answers once everything before it is durable.
RUN = """
import sys, threading, time
from pathlib import Path
from tailrace.sources.postgres.streaming.capture_task import CaptureTask
from tailrace.config.source.postgres import PostgresSource
from tailrace.config.sections import LogConfig
from tailrace.model import parse_lsn
path = Path(sys.argv[2])
source = PostgresSource(dsn=sys.argv[1], reconnect_s_max=0.1)
task = CaptureTask(source, path, LogConfig(path=path), name=sys.argv[3])
thread = threading.Thread(target=task.run, daemon=True)
print("ready", flush=True)
sys.stdin.readline()
thread.start()
for line in sys.stdin:
    while not task.caught_up(parse_lsn(line.strip())):
        assert thread.is_alive()
        time.sleep(0.05)
    print("caught up", flush=True)
task.stop()
thread.join()
"""

#: A Spark task's work on a range, for Parquet files; prints by how much its process grew at most.
TO_PARQUET = """
import sys
from pathlib import Path
from tests.support.sinks.rig import InProcess
from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.model import LogRange
from tailrace.sinks.files.parquet import parquet_format
from tailrace.sinks.files.sink import FileSink
from tailrace.ranges.plan import input_splits
def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
log, out = map(Path, sys.argv[1:])
sink = FileSink("lake", out, parquet_format())
sink.open(LogDirectory.open(log).identity, "shop")
with LogReader.open(log, "0") as reader:
    start, end = reader.start, reader.end().offset
    planned = input_splits("0", list(reader.blocks(start, end)), start, end)
before = memory("VmRSS")
sink.write(InProcess(), log, LogRange("0", start, end), planned)
print(memory("VmHWM") - before)
"""

MB = 1_000_000
COLUMNS = [f"c{number}" for number in range(1600)]
FIELD = "repeat('abcdefghij', 10000000)"


class Measured:
    """A capture in another process, whose memory is measured."""

    def __init__(self, process: subprocess.Popen[str], pg: Database) -> None:
        self._process = process
        self._pg = pg
        self._at = Path("/proc") / str(process.pid)

    def catch_up(self) -> None:
        """Wait until everything committed so far is in the log and no snapshot misses anything."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pg.query("select pg_switch_wal()")
        lsn = self._pg.query("select pg_current_wal_flush_lsn()::text")[0][0]
        self._process.stdin.write(f"{lsn}\n")
        self._process.stdin.flush()
        for said in self._process.stdout:
            if said == "caught up\n":
                return
        raise AssertionError("the capture ended")

    @property
    def most(self) -> int:
        """Its largest resident size in bytes since the start, or since `forget`."""
        return self._value("VmHWM")

    def forget(self) -> int:
        """Reset the largest size; return the present one."""
        (self._at / "clear_refs").write_text("5")
        return self._value("VmRSS")

    def _value(self, name: str) -> int:
        lines = (self._at / "status").read_text().splitlines()
        [value] = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
        return int(value) * 1024


@contextmanager
def measured(pg: Database, log: Path) -> Iterator[tuple[Measured, int]]:
    """Capture with the default settings; yield it with the size of the process at the start."""
    command = [sys.executable, "-c", RUN, pg.dsn, str(log), NAME]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdin is not None
            assert process.stdout.readline() == "ready\n"
            found = Measured(process, pg)
            before = found.forget()
            process.stdin.write("begin\n")
            process.stdin.flush()
            yield found, before
            process.stdin.close()
            assert process.wait(60) == 0
        finally:
            process.kill()


def to_parquet(log: Path, out: Path) -> int:
    """Write the whole log to Parquet files; return the bytes by which the process grew at most."""
    told = subprocess.run(
        [sys.executable, "-c", TO_PARQUET, str(log), str(out)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=240,
        check=True,
    )
    return int(told.stdout.splitlines()[-1])


def lengths(folder: Path, column: str) -> list[int]:
    """Return the lengths of a column's texts, sorted, without holding many texts at a time."""
    found: list[int] = []
    for path in folder.glob("*.parquet"):
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(1, columns=[column]):
                found += pc.utf8_length(batch.column(0)).to_pylist()
    return sorted(found)


@pytest.mark.ci
def test_a_snapshot_and_the_stream_together_stay_under_400_mb(pg: Database, tmp_path: Path) -> None:
    rows, log = 120_000, tmp_path / "log"
    pg.execute("create table items(id int primary key, t text)")
    insert = "insert into items select n, repeat(md5(n::text), 40) from generate_series({}, {}) n"
    pg.execute(insert.format(1, rows))
    pg.execute("analyze items")
    with measured(pg, log) as (capture, _):
        capture.catch_up()
        assert capture.most < 400 * MB
        capture.forget()
        asked = request(log, "public.items")
        over = is_over(log, asked)
        written = rows
        while not over():
            pg.execute(insert.format(written + 1, written + 5000))
            written += 5000
        capture.catch_up()
        assert capture.most < 400 * MB
    found = read_log(log)
    twice = [times for times in Counter(found.snapshot).values() if times > 1]
    assert len(twice) >= rows
    assert set(found.ids) == set(range(1, written + 1))


@pytest.mark.ci
def test_a_field_of_100_mb_passes_within_three_times_the_row(pg: Database, tmp_path: Path) -> None:
    pg.execute("create table large(id int primary key, t text)")
    pg.execute(f"insert into large select n, {FIELD} from generate_series(1, 2) n")
    with measured(pg, tmp_path / "log") as (capture, before):
        capture.catch_up()
        assert capture.most - before < 300 * MB
        streaming = capture.forget()
        pg.execute(f"insert into large select n, {FIELD} from generate_series(3, 4) n")
        pg.execute("update large set t = reverse(t) where id = 3")
        capture.catch_up()
        assert capture.most - streaming < 300 * MB
    grown = to_parquet(tmp_path / "log", tmp_path / "lake")
    assert grown < 1500 * MB
    assert lengths(tmp_path / "lake" / "public.large", "t") == [100_000_000] * 5


@pytest.mark.ci
def test_1600_columns_pass_within_100_mb(pg: Database, tmp_path: Path) -> None:
    pg.execute(f"create table wide({' int, '.join(COLUMNS)} int, primary key (c0))")
    wide = (
        f"insert into wide select n, {', '.join(map(str, range(1, 1600)))} from generate_series({{}}, {{}}) n"
    )
    pg.execute(wide.format(1, 2000))
    with measured(pg, tmp_path / "log") as (capture, before):
        capture.catch_up()
        assert capture.most - before < 100 * MB
        streaming = capture.forget()
        pg.execute(wide.format(2001, 4000))
        capture.catch_up()
        assert capture.most - streaming < 100 * MB
    grown = to_parquet(tmp_path / "log", tmp_path / "lake")
    assert grown < 1000 * MB
    found = pq.read_table(tmp_path / "lake" / "public.wide")
    assert sorted(found["c0"].to_pylist()) == list(range(1, 4001))
    for number in range(1, 1600):
        assert pc.min_max(found[f"c{number}"]).as_py() == {"min": number, "max": number}
