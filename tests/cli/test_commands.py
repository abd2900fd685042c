"""The command line: exit statuses, standard output and error, and messages."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
from contextlib import closing
from datetime import datetime, timedelta, timezone

import pytest
import structlog
import typer.testing

from tailrace import __version__, failpoints
from tailrace.changelog.retention.readers import Readers
from tailrace.changelog.writer import LogWriter
from tailrace.cli.conversation import block, configure_logs
from tailrace.cli.main import app
from tailrace.config import ColumnPolicy
from tailrace.decode.column_policy import TablePolicy
from tailrace.errors import Kind, TailraceError, printable
from tailrace.pipeline.log.inspection import Selection, follow
from tailrace.protocol import frames
from tests.support.orders_log import OID, LogOfOrders, begin, commit
from tests.support.spark.wire import INT4, TEXT, HandmadeLog, insert, message, relation
from tests.support.wait import wait_until

runner = typer.testing.CliRunner()


def run(*arguments):
    return runner.invoke(app, [str(argument) for argument in arguments])


def test_a_file_without_expressions_imports_no_database():
    code = "import sys, tailrace.config; assert 'duckdb' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from tailrace.cli.main import app\n"
        "heavy = set('numba numpy pyarrow pyspark psycopg pydantic yaml structlog deltalake'.split())\n"
        "try:\n"
        "    app(['--help'])\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in ("run", "serve", "check", "status", "log", "tail", "replay", "demo", "bench"):
        assert command in done.stdout


@pytest.mark.slow
def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "tailrace", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"tailrace {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["run"],
        ["run", "--nonsense", "x.yaml"],
        ["log", "show", "x", "--from", "yesterday"],
        ["log", "show", "x", "--limit", "0"],
        ["log", "show", "x", "--key", "a=1", "--key", "b"],
        ["log", "show", "x", "--where", "after.id >"],
        ["tail", "x", "--where", "id > 1"],
        ["tail", "x", "--from", "yesterday"],
        ["bench", "nothing"],
        ["serve", ".", "--token", "secret"],
        ["serve", ".", "--origin", "*"],
        ["run", "not-there.yaml"],
        ["check", "not-there.yaml"],
        ["status", "not-there.yaml"],
        ["replay", "not-there.yaml", "--sink", "0"],
    ],
)
def test_bad_usage_ends_with_2_and_a_message(arguments):
    done = run(*arguments)
    assert done.exit_code == 2
    assert "Traceback" not in done.output
    assert "Value error" not in done.output  # pydantic's word


@pytest.mark.parametrize("into", ["~nobody-of-that-name/copy", "s3://bucket/copy", ""])
def test_a_copy_at_a_place_that_no_sink_can_have_is_bad_usage(tmp_path, monkeypatch, into):
    monkeypatch.chdir(tmp_path)
    text = "name: shop\nsource: {}\nlog: {path: log}\nsinks: [{type: jsonl, path: j}]\n"
    (tmp_path / "p.yaml").write_text(text)
    done = run("replay", "p.yaml", "--sink", "0", "--into", into)
    assert (done.exit_code, "error: config_invalid: read --into: it" in done.stderr) == (2, True), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["p.yaml"]


def test_a_failure_ends_with_1_and_one_block(tmp_path):
    done = run("log", "ls", tmp_path / "none")
    assert done.exit_code == 1
    assert done.stdout == ""
    first, *rest = done.stderr.splitlines()
    assert first.startswith("error: log_missing: ")
    assert rest[-1].startswith("  hint: ")


def test_serve_reports_a_missing_log_at_once(tmp_path):
    done = run("serve", tmp_path / "none")
    assert done.exit_code == 1
    assert "log_missing" in done.stderr


@pytest.mark.parametrize("command", ["log forget --reader lake", "log show", "log verify", "status"])
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="gives its rights up")
def test_another_users_log_is_said_to_be_one(tmp_path, command):
    """Root without its rights over others' files is such a user."""
    log = tmp_path / "log"
    HandmadeLog(log).close()
    os.chown(log, 65534, 65534)
    file = tmp_path / "shop.yaml"
    file.write_text(f"name: shop\nsource: {{host: 127.0.0.1, port: 1}}\nlog: {{path: {log}}}\n")
    limits = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--inh-caps", "-dac_override"]
    command, *options = command.replace("log ", "log-").split()
    program = [sys.executable, "-m", "tailrace", *command.split("-"), str(file), *options]
    done = subprocess.run([*limits, *program], capture_output=True, text=True, check=False, timeout=60)
    assert "environment_unfit: open a change log: this user has no right to it" in done.stdout + done.stderr


@pytest.mark.parametrize("command", [["log", "ls"], ["log", "show"], ["tail"]])
def test_a_failure_under_json_is_one_document(tmp_path, command):
    done = run(*command, tmp_path / "none", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["error"]["kind"] == "log_missing"


@pytest.mark.follows("schema_missing")
@pytest.mark.parametrize("way", ["restored", "new log"])
def test_a_log_that_lacks_a_tables_description_is_restored_or_begun_again(tmp_path, monkeypatch, way):
    items = relation(1, "public.items", {"id": INT4})
    log, backup = tmp_path / "log", tmp_path / "backup"
    with HandmadeLog(backup) as written:
        written.commit(items, insert(1, "7"))
    with monkeypatch.context() as patched, HandmadeLog(log) as written:
        patched.setattr(LogWriter, "_check_described", lambda *_: None)  # as another program might write it
        written.commit(insert(1, "7"))
    refused = run("log", "show", log).stderr
    assert refused.startswith("error: schema_missing")
    assert "`tailrace log verify` says from which offset on" in refused
    done = run("log", "verify", log)
    assert (done.exit_code, "no reader gets past offset 0" in done.output) == (1, True)
    if way == "restored":
        assert "Restore its directory from a backup" in refused
        shutil.rmtree(log)
        shutil.copytree(backup, log)
    else:
        assert "or begin a new log" in refused
        log = tmp_path / "new log"
        with HandmadeLog(log) as written:
            written.commit(items, insert(1, "7"))
    assert json.loads(run("log", "show", log, "--json").stdout)["after"] == {"id": 7}


def test_a_trace_is_shown_only_for_debug(tmp_path):
    assert "Traceback" not in run("log", "ls", tmp_path / "none").stderr
    assert "Traceback" in run("log", "ls", tmp_path / "none", "--debug").stderr
    assert "Traceback" in run("--debug", "log", "ls", tmp_path / "none").stderr


SHOP = """\
name: shop
source: {host: 127.0.0.1, port: 1}
log: {path: ./log}
sinks: [{name: out, type: jsonl, path: ./lines}]
"""


@pytest.mark.follows("internal")
def test_a_bug_is_reported_with_version_and_trace(tmp_path):
    (tmp_path / "p.yaml").write_text(SHOP)
    with closing(LogOfOrders(tmp_path / "log")) as log:
        log.insert(1, 2)
    try:
        failpoints.arm("sink.before_write=error")
        shown = run("replay", tmp_path / "p.yaml", "--sink", "out").stderr
        failpoints.arm("sink.before_write=error")
        traced = run("replay", tmp_path / "p.yaml", "--sink", "out", "--debug").stderr
    finally:
        failpoints.arm("")
    assert "error: internal: unexpected FailpointError\n" in shown
    found = re.search(r"with `tailrace (--version)` and the trace that (--debug) shows", shown)
    assert __version__ in run(found[1]).stdout
    assert "Traceback" not in shown
    assert 'failpoints.hit("sink.before_write")' in traced
    assert "sink out: 2 rows written" in run("replay", tmp_path / "p.yaml", "--sink", "out").stdout


def test_debug_shows_where_a_users_function_raised(tmp_path, monkeypatch):
    (tmp_path / "p.yaml").write_text(
        SHOP.replace(
            "type: jsonl, path: ./lines",
            "type: python, handler: 'mine_for_debug:take', retry_attempts_max: 0",
        )
    )
    (tmp_path / "mine_for_debug.py").write_text("def take(records):\n    raise ValueError('my words')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with closing(LogOfOrders(tmp_path / "log")) as log:
        log.insert(1)
    done = run("replay", tmp_path / "p.yaml", "--sink", "out", "--debug")
    assert "sink_write_failed" in done.stderr
    assert "(--debug shows them)" in done.stderr
    assert 'mine_for_debug.py", line 2, in take' in done.stderr
    assert "ValueError: my words" in done.stderr


def test_every_problem_of_a_file_is_reported_with_its_place(tmp_path):
    (tmp_path / "p.yaml").write_text("name: a b\nsource: {prot: 1}\nlog: {path: x}\n")
    done = run("run", tmp_path / "p.yaml")
    assert done.exit_code == 2
    assert "name (line 1): " in done.stderr
    assert "source.prot (line 2): unknown key; did you mean 'port'?" in done.stderr


def test_check_under_json_prints_the_problems_and_nothing_else(tmp_path):
    (tmp_path / "p.yaml").write_text("name: a b\nsource: {prot: 1}\nlog: {path: x}\n")
    done = run("check", tmp_path / "p.yaml", "--json")
    assert done.exit_code == 2
    document = json.loads(done.stdout)
    assert document["ok"] is False
    assert [problem["kind"] for problem in document["problems"]] == ["config_invalid"] * 2
    assert set(document["problems"][0]) == {"kind", "severity", "message", "repair"}


def test_check_reports_a_missing_token_of_subscriptions(tmp_path, monkeypatch):
    monkeypatch.delenv("TAILRACE_TOKEN", raising=False)
    text = "name: shop\nsource: {host: 127.0.0.1, port: 1}\nlog: {path: x}\nsubscriptions: {}\n"
    (tmp_path / "p.yaml").write_text(text)
    done = run("check", tmp_path / "p.yaml")
    assert done.exit_code == 2
    assert "error: secret_missing: resolve ${env:TAILRACE_TOKEN}" in done.stdout


def test_check_of_an_unreachable_server_ends_with_1(tmp_path):
    (tmp_path / "p.yaml").write_text("name: shop\nsource: {host: 127.0.0.1, port: 1}\nlog: {path: x}\n")
    done = run("check", tmp_path / "p.yaml")
    assert done.exit_code == 1
    assert "error: source_unreachable: " in done.stdout
    assert "repair: " in done.stdout


def test_control_characters_in_foreign_names_are_escaped(capsys):
    assert printable("a\x1b[2Jb\r\u2028c") == "a\\x1b[2Jb\\r\\u2028c"
    text = block(TailraceError(Kind.TABLE_MISSING, "x\x1b]0;", "y\x07", {"table": "\x9b"}))
    assert text.replace("\n", "").isprintable()
    configure_logs("warning")
    structlog.get_logger("any").warning('the table "x\n\x1b[2J" was taken out', table="y\n")
    assert capsys.readouterr().err.removesuffix("\n").isprintable()


@pytest.fixture
def orders(tmp_path):
    log = LogOfOrders(tmp_path / "log")
    log.insert(1, 2, 3)
    log.insert(4)
    yield log
    log.close()


def test_log_ls_lists_tasks_segments_and_readers(orders):
    path = orders.directory.path
    document = json.loads(run("log", "ls", path, "--json").stdout)
    (task,) = document["tasks"]
    assert (task["task"], task["start"], task["end"]) == ("0", 0, orders.writer.durable.offset)
    assert task["segments"][0]["file"].endswith(".seg")
    assert "task 0: 0 to " in run("log", "ls", path).stdout


def test_log_forget_removes_all_the_named_readers_or_none(orders):
    path, readers = orders.directory.path, Readers(orders.directory)
    for name in ("kept", "gone", "gone too"):
        readers.register(name, {"0": 0})
    refused = run("log", "forget", path, "--reader", "gone", "--reader", "never was")
    assert refused.exit_code == 1
    assert "'never was'" in refused.output
    assert len(readers.all()) == 3
    done = run("log", "forget", path, "--reader", "gone", "--reader", "gone too", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {"forgotten": ["gone", "gone too"], "readers": ["kept"]}
    assert [reader.name for reader in readers.all()] == ["kept"]


def test_log_verify_finds_a_flipped_byte(orders):
    path = orders.directory.path
    assert run("log", "verify", path).exit_code == 0
    (segment,) = path.rglob("*.seg")
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)
    done = run("log", "verify", path, "--json")
    assert done.exit_code == 1
    document = json.loads(done.stdout)
    assert document["ok"] is False
    assert document["problems"][0]["file"].endswith(".seg")


def test_log_verify_finds_messages_that_no_reader_could_decode(tmp_path):
    log = LogOfOrders(tmp_path / "log")
    log.insert(1)
    short = struct.pack("!cIcHc", b"I", OID, b"N", 1, b"n")  # the table has two columns
    messages = [begin(5000, 0, 9), short, commit(5000, 0)]
    log._append(b"".join(frames.xlog_frame(5000, 5000, 0, each) for each in messages))
    log.close()
    done = run("log", "verify", tmp_path / "log", "--json")
    assert done.exit_code == 1
    [problem] = json.loads(done.stdout)["problems"]
    assert problem["file"].endswith(".seg")
    assert "another number of columns" in problem["what"]


def ids(*arguments):
    done = run("log", "show", *arguments, "--json")
    assert done.exit_code == 0, done.output
    return [json.loads(line)["after"]["id"] for line in done.stdout.splitlines()]


def test_log_show_selects_by_table_key_transaction_position_and_time(orders):
    path = orders.directory.path
    assert ids(path) == [1, 2, 3, 4]
    assert ids(path, "--limit", 2) == [1, 2]
    assert ids(path, "--table", "public.orders") == [1, 2, 3, 4]
    assert ids(path, "--table", "*.ord*") == [1, 2, 3, 4]
    assert ids(path, "--table", "public.other") == []
    assert ids(path, "--key", "2") == [2]
    assert ids(path, "--key", "id=3", "--key", "what=thing") == [3]
    assert ids(path, "--key", "nothing=3") == []
    assert ids(path, "--transaction", 702) == [4]
    assert ids(path, "--from", "0/7D0") == [4]
    assert ids(path, "--to", "0/7D0") == [1, 2, 3]
    assert ids(path, "--from", "2026-01-01T00:00:02Z") == [4]
    assert ids(path, "--to", "2026-01-01T01:00:02+01:00") == [1, 2, 3]


def test_a_part_of_a_log_that_begins_after_its_end_is_refused(orders):
    done = run("log", "show", orders.directory.path, "--from", "2026-01-01T00:00:02Z", "--to", "0")
    assert done.exit_code == 2
    assert "after --to, 0" in done.output
    assert "exchange them" in done.output
    assert ids(orders.directory.path, "--from", "0", "--to", "0") == []


def test_a_task_without_a_name_is_missing(orders):
    for command in ("show", "schemas"):
        done = run("log", command, orders.directory.path, "--task", "")
        assert done.exit_code == 1
        assert "it has no such task" in done.output


def test_an_lsn_after_the_logs_end_is_refused_and_a_past_time_after_it_is_its_end(orders):
    path = orders.directory.path
    assert ids(path, "--from", "2026-02-01") == []
    assert ids(path, "--to", "2026-02-01") == [1, 2, 3, 4]
    for option in ("--from", "--to"):
        done = run("log", "show", path, option, "0/FFFF", "--json")
        assert done.exit_code == 1
        assert "find the LSN 0/FFFF in a change log: it has reached 0/" in done.output


@pytest.mark.parametrize("named", ["an hour from now, without its zone", "9999-12-31T23:59:59-10:00"])
def test_a_time_in_the_future_is_refused(orders, named):
    if named.startswith("an hour"):
        # A user one hour east of Greenwich means the present time.
        named = datetime.now(timezone(timedelta(hours=1))).replace(tzinfo=None).isoformat()
    for option in ("--from", "--to"):
        done = run("log", "show", orders.directory.path, option, named, "--json")
        assert done.exit_code == 1
        assert "it is in the future" in done.output
        assert "with its zone" in done.output


@pytest.mark.parametrize("command", [["log", "show"], ["log", "schemas"], ["tail"]])
def test_an_invalid_pattern_of_tables_is_refused(orders, command):
    done = run(*command, orders.directory.path, "--table", "orders")
    assert done.exit_code == 2
    assert "'orders' must be of the form schema.table" in " ".join(done.stderr.replace("│", " ").split())


def test_log_show_selects_by_an_expression(orders):
    path = orders.directory.path
    assert ids(path, "--where", "after.id > 2") == [3, 4]
    assert ids(path, "--where", "after.id > 2 and op = 'c'", "--to", "0/7D0") == [3]
    assert ids(path, "--where", "before.id = 1") == []  # no condition on NULL is true
    done = run("log", "show", path, "--where", "after.qty > 2")
    assert done.exit_code == 2
    assert "public.orders has no 'qty'" in done.stderr


@pytest.mark.slow
def test_tail_shows_changes_as_they_come_and_says_where_to_continue(orders):
    path = orders.directory.path
    command = [sys.executable, "-m", "tailrace", "tail", str(path), "--table", "public.orders", "--json"]
    with subprocess.Popen(
        [*command, "--from", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert [json.loads(process.stdout.readline())["after"]["id"] for _ in range(4)] == [1, 2, 3, 4]
        before = orders.writer.durable.offset
        orders.insert(5)
        assert json.loads(process.stdout.readline())["after"]["id"] == 5
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    # The signal may come after a change is shown and before its position is taken: then it is shown again.
    assert said in [f"continue with --from {at}\n" for at in (before, orders.writer.durable.offset)]


def test_tail_that_showed_nothing_prints_where_it_began(orders, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("tailrace.pipeline.log.inspection.next_split", interrupted)
    done = run("tail", orders.directory.path)
    assert (done.exit_code, done.stderr) == (130, f"continue with --from {orders.writer.durable.offset}\n")


def test_tail_continues_after_the_last_change_that_it_showed(orders):
    path, shown, begin = orders.directory.path, [], "0"
    for _ in range(4):
        done = run("tail", path, "--from", begin, "--limit", 1, "--where", "after.id <> 2", "--json")
        assert done.exit_code == 0, done.output
        shown.append(json.loads(done.stdout)["after"]["id"])
        begin = done.stderr.split()[-1]
        if shown[-1] == 4:
            break
    assert shown == [1, 3, 4]


def test_tail_shows_each_change_of_a_log_that_rolls_once_in_order(tmp_path):
    orders = LogOfOrders(tmp_path / "log", segment_bytes=4000)
    orders.insert(-1)
    stop, shown = threading.Event(), []
    following = threading.Thread(
        target=lambda: [
            shown.extend(json.loads(line)["after"]["id"] for line in found.lines)
            for found in follow(orders.directory, "0", Selection(), TablePolicy.of(ColumnPolicy()), stop)
        ]
    )
    following.start()
    # It begins at the log's end of that moment.
    wait_until(lambda: orders.insert(0) and shown, 10, "the first change")
    for number in range(1, 200):
        orders.insert(number)
    wait_until(lambda: shown[-1:] == [199], 10, "the last change")
    stop.set()
    following.join(10)
    orders.close()
    assert [number for number in shown if number] == list(range(1, 200))
    assert len(orders.directory.segments("0")) > 3


def test_log_show_accepts_the_offset_of_any_change(orders):
    path = orders.directory.path
    lines = run("log", "show", path, "--json").stdout.splitlines()
    third = json.loads(lines[2])["position"]["log_offset"]
    assert ids(path, "--from", third) == [3, 4]
    assert ids(path, "--to", third) == [1, 2]
    assert run("log", "show", path, "--from", 10**9).exit_code == 1


def test_log_show_has_a_readable_form(orders):
    first = run("log", "show", orders.directory.path, "--limit", 1).stdout
    assert "insert public.orders" in first
    assert '"id"=1' in first
    assert "2026-01-01T00:00:01" in first


def test_log_show_has_a_readable_form_of_a_message_outside_of_transactions(tmp_path):
    with HandmadeLog(tmp_path / "log") as log:
        log.commit(relation(1, "public.orders", {"id": INT4}), insert(1, 5))
        log.append(message(1150, "note", b"hello"))
        log.commit(insert(1, 6))
    told = run("log", "show", tmp_path / "log")
    assert told.exit_code == 0, told.output
    line = told.stdout.splitlines()[1]
    assert " 0/47E - xid=- " in line
    assert line.endswith(' message {"prefix"="note", "content"="aGVsbG8="}')


@pytest.mark.slow
def test_a_closed_output_pipe_is_no_error(orders):
    command = f"{sys.executable} -m tailrace log show {orders.directory.path} | head -c 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(("output", "status"), [(">/dev/full", 1), (">&-", 0)])
def test_output_that_cannot_be_written_is_reported_without_a_traceback(orders, output, status, unbuffered):
    command = f"{sys.executable} -m tailrace log ls {orders.directory.path} --json {output}"
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == status
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("output", [">/dev/full", "2>/dev/full", "<&- >&- 2>&-"])
def test_a_run_goes_on_if_its_output_can_not_be_written(tmp_path, output):
    file = tmp_path / "p.yaml"
    file.write_text(
        "name: shop\nsource: {host: 127.0.0.1, port: 1, reconnect_s_max: 0.5}\nlog: {path: ./log}\n"
    )
    command = f"{sys.executable} -m tailrace run {file} {output}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=False, timeout=240, env=os.environ
    )
    assert done.returncode in (1, 120), done.stderr
    assert ("error: source_unreachable: " in done.stderr) == ("2>" not in output)
    status = json.loads((tmp_path / "log" / "status.json").read_text())
    assert status["error"]["kind"] == "source_unreachable"
    assert status["tasks"][0]["reconnects"] > 0


@pytest.mark.slow
def test_no_character_stops_the_output(tmp_path):
    with HandmadeLog(tmp_path / "log") as log:
        log.commit(relation(1, "public.bücher→", {"id": INT4}), insert(1, 5))
    done = subprocess.run(
        [sys.executable, "-m", "tailrace", "log", "show", tmp_path / "log"],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        encoding="latin-1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert r"insert public.bücher\u2192" in done.stdout


def test_a_log_with_times_of_any_year_can_be_looked_into(tmp_path):
    with HandmadeLog(tmp_path / "log") as log:
        log.EPOCH_US *= 1000  # a source of a user's that gives nanoseconds
        log.commit(relation(1, "public.orders", {"id": INT4}), insert(1, 5))
    assert " 57971-02-25T00:00:01.000Z " in run("log", "show", tmp_path / "log").stdout
    found = json.loads(run("log", "ls", tmp_path / "log", "--json").stdout)
    assert found["tasks"][0]["newest_commit"] == "57971-02-25T00:00:01Z"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["show", "schemas"])
def test_json_is_utf8_in_every_locale(tmp_path, command):
    with HandmadeLog(tmp_path / "log") as log:
        log.commit(relation(1, "public.books", {"bücher→😀": TEXT}), insert(1, "bücher→😀"))
    done = subprocess.run(
        [sys.executable, "-m", "tailrace", "log", command, tmp_path / "log", "--json"],
        capture_output=True, check=False, env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "bücher→😀" in json.dumps(json.loads(done.stdout.decode()), ensure_ascii=False)


def test_a_log_command_also_accepts_the_pipelines_file(orders):
    file = orders.directory.path.parent / "p.yaml"
    file.write_text("name: shop\nsource: {host: localhost}\nlog: {path: ./log}\n")
    assert ids(file) == [1, 2, 3, 4]


def test_status_works_without_an_engine_and_without_the_source(orders):
    file = orders.directory.path.parent / "p.yaml"
    file.write_text(
        "name: shop\nsource: {host: 127.0.0.1, port: 1}\nlog: {path: ./log}\n"
        "sinks: [{type: parquet, path: ./pq}, {type: delta, path: ./d, mode: mirror}]\n"
    )
    orders.close()
    done = run("status", file, "--json")
    assert done.exit_code == 0
    document = json.loads(done.stdout)
    assert set(document) == {"name", "state", "tasks", "sinks", "error"}
    (task,) = document["tasks"]
    assert (task["state"], task["source_lag_bytes"], task["source_lag_s"]) == ("stopped", None, None)
    assert set(task) == {
        "task", "state", "source_lag_bytes", "source_lag_s", "log_end", "position", "error", "slot",
        "warnings", "snapshot",
    }  # fmt: skip
    end = task["log_end"]
    assert end > 0
    for sink, kind in zip(document["sinks"], ("parquet", "delta"), strict=True):
        assert (sink["type"], sink["state"], sink["position"], sink["lag_bytes"]) == (
            kind,
            "stopped",
            None,
            end,
        )
        assert sink["lag_s"] > 0
        assert set(sink) == {"name", "type", "state", "position", "lag_bytes", "lag_s", "error"}
    assert "parquet-pq" in run("status", file).stdout


def test_snapshots_are_requested_listed_and_cancelled_without_an_engine(orders):
    path = orders.directory.path
    orders.close()
    file = path.parent / "p.yaml"
    file.write_text(f"name: shop\nsource: {{host: 127.0.0.1, port: 1}}\nlog: {{path: {path}}}\n")
    assert run("snapshot", file, "--list").stdout == "no snapshots\n"
    asked = run("snapshot", file, "--table", "public.orders", "--where", "id > 5", "--json")
    document = json.loads(asked.stdout)
    assert document["engine_runs"] is False
    (listed,) = json.loads(run("snapshot", file, "--list", "--json").stdout)["snapshots"]
    assert (listed["id"], listed["state"], listed["where"]) == (document["id"], "waiting", "id > 5")
    assert [table["name"] for table in listed["tables"]] == ["public.orders"]
    assert "waits for the next `tailrace run`" in run("snapshot", file, "--table", "a.b").stdout
    assert "public.orders: 0 rows" in run("snapshot", file, "--list").stdout
    assert run("snapshot", file, "--cancel").exit_code == 0
    assert run("log", "verify", path).exit_code == 0
    for word, said in (("--pause", "snapshots pause"), ("--resume", "snapshots resume")):
        assert said in run("snapshot", file, word).stdout
        assert len(json.loads(run("snapshot", file, "--list", "--json").stdout)["snapshots"]) == 2
    for words in (
        [],
        ["--list", "--cancel"],
        ["--list", "--table", "a.b"],
        ["--cancel", "--where", "x"],
        ["--pause", "--resume"],
        ["--pause", "--table", "a.b"],
        ["--where", "x"],
    ):
        assert run("snapshot", file, *words).exit_code == 2


def test_an_empty_condition_requests_no_snapshot_of_all_rows(orders):
    file = orders.directory.path.parent / "p.yaml"
    file.write_text("name: shop\nsource: {}\nlog: {path: ./log}\n")
    done = run("snapshot", file, "--table", "public.orders", "--where", "")
    assert (done.exit_code, "it is empty" in done.stderr) == (2, True), done.output


def test_a_snapshot_before_the_first_run_is_refused(tmp_path):
    (tmp_path / "p.yaml").write_text("name: shop\nsource: {host: h}\nlog: {path: x}\n")
    done = run("snapshot", tmp_path / "p.yaml", "--table", "a.b", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["error"]["kind"] == "log_missing"


def test_status_before_the_first_run_is_no_error(tmp_path):
    (tmp_path / "p.yaml").write_text("name: shop\nsource: {host: 127.0.0.1, port: 1}\nlog: {path: ./log}\n")
    document = json.loads(run("status", tmp_path / "p.yaml", "--json").stdout)
    [task] = document["tasks"]
    assert (task["log_end"], task["position"], task["slot"]) == (None, None, None)
    assert (task["warnings"], task["snapshot"]) == ([], [])
    assert document["error"] is None


def test_status_reports_a_damaged_log(orders):
    file = orders.directory.path.parent / "p.yaml"
    file.write_text("name: shop\nsource: {host: 127.0.0.1, port: 1}\nlog: {path: ./log}\n")
    orders.close()
    identity = orders.directory.path / "identity.json"
    identity.write_bytes(identity.read_bytes().replace(b"shop", b"shoq"))
    document = json.loads(run("status", file, "--json").stdout)
    assert document["error"]["kind"] == "log_corrupt"


@pytest.mark.slow
def test_a_second_engine_on_a_log_is_refused_at_once(orders):
    file = orders.directory.path.parent / "p.yaml"
    file.write_text(
        "name: shop\nsource: {host: 127.0.0.1, port: 1}\nlog: {path: ./log}\n"
        "sinks: [{type: jsonl, path: ./out}]\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "tailrace", "run", file],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 1
    assert "error: log_locked: " in done.stderr


@pytest.mark.parametrize("command", [["demo"], ["bench", "decode"]])
def test_without_the_tools_package_demo_and_bench_name_it(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "tailrace_demo", None)
    monkeypatch.setitem(sys.modules, "tailrace_bench", None)
    result = runner.invoke(app, command)
    assert result.exit_code != 0
    assert "environment_unfit" in result.stderr
    assert "pip install ./tools" in result.stderr
