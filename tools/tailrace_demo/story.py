"""The steps of the demo: a shop, a pipeline, a kill, and a check of the result."""

from __future__ import annotations

import secrets
import shutil
import time
from contextlib import ExitStack
from pathlib import Path

from tailrace import config
from tailrace.spark.java import require_java
from tailrace_demo import proof
from tailrace_demo.places import Places, own_directory, write_private
from tailrace_demo.process import DemoPipeline
from tailrace_demo.progress import PipelinePositions, progress
from tailrace_demo.screen import Screen, ScreenStep
from tailrace_demo.shop import Shop
from tailrace_servers.install import find_install
from tailrace_servers.postgres import EmbeddedPostgres

POSTGRES_VERSION = 18
DATABASE = "shop"
WRITERS = 2
PAUSE_S = 0.004
TIMEOUT_S = 180.0

_PIPELINE = """\
name: shop
source:
  type: postgresql
  host: 127.0.0.1
  port: {port}
  user: postgres
  password: ${{file:./password}}
  dbname: shop
  tables: ["public.*"]
log:
  path: ./shop.log
sinks:
  - {{name: current, type: delta, mode: mirror, path: ./lake/current}}
  - {{name: history, type: delta, mode: append, path: ./lake/history}}
"""


def run(directory: Path | None = None, *, keep: bool = True, seconds: float = 12) -> int:
    """Run a pipeline on a real PostgreSQL, kill it, run it again, and check its guarantees.

    :param directory: for the files; emptied first if an earlier demo created it.
    :param keep: whether to keep the files.
    :param seconds: total duration of the pipeline's work, without starting and catching up.
    :returns: the exit status: 0 if all claims are true.
    :raises TailraceError: if a requirement of the demo is missing, or the pipeline fails.
    """
    require_java()
    install = find_install(POSTGRES_VERSION)
    screen = Screen()
    screen.headline("Tailrace demo", "PostgreSQL → durable change log → Spark → Delta Lake, each change once")
    with ExitStack() as stack:
        places = stack.enter_context(own_directory(directory or Path("tailrace-demo")))
        password = secrets.token_urlsafe(16)
        with screen.step(f"start PostgreSQL {POSTGRES_VERSION}, open a small shop in it") as step:
            server = stack.enter_context(EmbeddedPostgres(install, password=password))
            server.create_database(DATABASE)
            shop = Shop(lambda: server.connect(DATABASE), writers=WRITERS, pause_s=PAUSE_S)
            shop.open()
            step.result = f"127.0.0.1:{server.port}"
        write_private(places.password, password)
        places.file.write_text(_PIPELINE.format(port=server.port), encoding="utf-8")
        screen.file(places.file, places.file.read_text(encoding="utf-8"))
        process = stack.enter_context(DemoPipeline(places.file, places.output))
        _trade(screen, places, shop, process, seconds)
        with screen.step("compare the lake with the shop"), server.connect(DATABASE) as connection:
            found = list(proof.findings(places.mirror, places.history, connection))
        screen.findings(found)
        proven = all(finding.holds for finding in found)
        screen.verdict(proven)
        if keep:
            _say_where_and_what_next(screen, places)
        else:
            shutil.rmtree(places.root)
    return 0 if proven else 1


def _trade(screen: Screen, places: Places, shop: Shop, process: DemoPipeline, seconds: float) -> None:
    """Let the shop work while the pipeline runs, is killed and runs again; then let it catch up and stop."""
    with shop:
        with screen.step("[bold]tailrace run pipeline.yaml[/], while the shop sells") as step:
            _live(step, places, shop, process, seconds / 2)
        with screen.step("kill it with SIGKILL, in the middle of its work") as step:
            step.result = f"process {process.pid}; the shop continues to sell"
            process.kill()
        with screen.step("run it again with the same command") as step:
            _live(step, places, shop, process, seconds / 2)
    with screen.step("close the shop, let the pipeline catch up, stop it") as step:
        _catch_up(step, places, process, shop.last_sale())
        process.stop()
        step.result = f"{shop.transactions:,} transactions, {shop.changes:,} changes"


def _live(step: ScreenStep, places: Places, shop: Shop, process: DemoPipeline, seconds: float) -> None:
    """Run the pipeline until every sink has got changes, and for `seconds` more."""
    before = _progress(places)
    process.start()

    def show(now: PipelinePositions) -> None:
        step.result = f"{shop.transactions:,} transactions, {now.phrase}"
        step.note(step.result)

    def moved() -> bool:
        show(now := _progress(places))
        return now.beyond(before)

    process.wait_until(moved, "the first changes in the lake", TIMEOUT_S)
    enough_at = time.monotonic() + seconds

    def enough() -> bool:
        show(_progress(places))
        return time.monotonic() > enough_at

    process.wait_until(enough, "a while of work", seconds + TIMEOUT_S)


def _catch_up(step: ScreenStep, places: Places, process: DemoPipeline, last_sale: int) -> None:
    """Wait until every sink has all changes of the shop."""

    def caught_up() -> bool:
        now = _progress(places)
        step.note(now.phrase)
        return now.has_everything_after(last_sale)

    process.wait_until(caught_up, "everything in the lake", TIMEOUT_S)


def _progress(places: Places) -> PipelinePositions:
    return progress(config.load_engine(places.file))


def _say_where_and_what_next(screen: Screen, places: Places) -> None:
    def shown(path: Path) -> str:
        inside = Path.cwd() in path.parents
        return str(path.relative_to(Path.cwd())) if inside else str(path)

    screen.pointers(
        "Where it all is",
        [
            (shown(places.mirror), "Delta tables equal to the shop's"),
            (shown(places.history), "Delta tables of every change, with its transaction and position"),
            (shown(places.log), "the change log: everything can be read again from here"),
            (shown(places.output), "what the pipeline printed"),
        ],
    )
    file, log = shown(places.file), shown(places.log)
    screen.pointers(
        "What to try next",
        [
            (f"tailrace status {file}", "where the pipeline stands, running or not"),
            (
                f"tailrace log show {log} --table public.account --key 1",
                "the shop's own account, move by move",
            ),
            (f"tailrace log verify {log}", "every byte of the log against its checksums"),
            (f'spark.read.format("tailrace").load("{log}")', "the log as a DataFrame, in any Spark job"),
        ],
    )
