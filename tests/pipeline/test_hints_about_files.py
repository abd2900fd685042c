"""Follows the printed hints of errors about damaged, lost and foreign files of logs and sinks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet
import pytest
import structlog

from tailrace import failpoints
from tailrace.changelog import durable
from tailrace.errors import Kind
from tests.support.pipeline.shop import Shop
from tests.support.wait import wait_until


def flip(path: Path, at: int) -> None:
    """Change one byte."""
    content = bytearray(path.read_bytes())
    content[at] ^= 0x20
    path.write_bytes(content)


def last_segment(log: Path) -> Path:
    return max((log / "tasks" / "0").glob("*.seg"))


# ---------------------------------------------------------------------- a damaged log


def damage_block(log: Path) -> None:
    path = last_segment(log)
    flip(path, path.stat().st_size // 2)


def cut_end(log: Path) -> None:
    path = last_segment(log)
    path.write_bytes(path.read_bytes()[:200])


def damage_state(log: Path) -> None:
    for path in (log / "tasks" / "0").glob("capture.state*"):
        flip(path, 8)


def damage_identity(log: Path) -> None:
    flip(log / "identity.json", 8)


#: What is damaged, and what must be restored according to the hint: the error's file, or the whole directory.
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a block": (damage_block, "restore this file from a backup of the log"),
    "the end": (cut_end, "restore the log's directory from a backup"),
    "a state file": (damage_state, "restore one of them from a backup of the log"),
    "the identity": (damage_identity, "restore this small file from a backup"),
}


@pytest.mark.follows("log_corrupt")
@pytest.mark.parametrize("way", ["restored", "new log"])
@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_log(shop: Shop, case: str, way: str) -> None:
    damage, wanted = DAMAGE[case]
    shop.create_orders()
    shop.run()
    shop.run()  # there are older generations
    log = shop.config().log.path
    shutil.copytree(log, shop.root / "backup")
    damage(log)
    shop.pg.execute("delete from orders where id = 1")
    error = shop.refused(Kind.LOG_CORRUPT)
    assert wanted in error.hint
    if "`tailrace log verify`" in error.hint:
        assert "damage" in shop.command(f"tailrace log verify {log}", status=1)
    if way == "new log":
        shop.follow_steps(error)
    else:
        restored = log if "directory" in wanted else Path(error.context["file"])
        if restored.is_dir():
            shutil.rmtree(restored)
            shutil.copytree(shop.root / "backup", restored)
        else:
            shutil.copyfile(shop.root / "backup" / restored.relative_to(log), restored)
    shop.run()
    shop.require_equal("orders")


# ---------------------------------------------------------------------- a full disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system here")
    try:
        yield path
    finally:
        # Lazily: a worker of Spark that is kept may still have a file open.
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.follows("log_full")
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
@pytest.mark.parametrize("is_first", [False, True], ids=["later", "first start"])
def test_space_is_made_on_a_full_disk(shop: Shop, disk: Path, is_first: bool) -> None:
    shop.log["path"] = str(disk / "log")
    shop.create_orders()
    if not is_first:
        shop.run()
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(disk).free - (0 if is_first else 64 << 10)))
    shop.pg.execute("insert into orders select n, n from generate_series(6, 50000) n")

    def make_room() -> None:
        wait_until(lambda: "continues by itself" in str(said), 30, "the disk to be full")
        ballast.unlink()

    with structlog.testing.capture_logs() as said:
        person = threading.Thread(target=make_room)
        person.start()
        shop.run()
        person.join()
    assert "make room on the log's file system; nothing that was stored is lost" in str(said)
    shop.require_equal("orders")


# ---------------------------------------------------------------------- a foreign directory


@pytest.mark.follows("log_foreign")
@pytest.mark.parametrize("way", ["empty directory", "restored"])
def test_a_directory_that_lost_the_logs_identity(shop: Shop, way: str) -> None:
    shop.create_orders()
    shop.run()
    kept = (shop.config().log.path / "identity.json").read_bytes()
    (shop.config().log.path / "identity.json").unlink()
    shop.pg.execute("delete from orders where id = 1")
    error = shop.refused(Kind.LOG_FOREIGN)
    if way == "restored":
        assert "if this was a change log, restore its identity.json" in error.hint
        (shop.config().log.path / "identity.json").write_bytes(kept)
    else:
        assert "name an empty directory in log.path" in error.hint
        shop.log["path"] = "./empty"
        # The slot belongs to the lost log, and so do the target's rows: each is reported in turn.
        assert "drop it with" in shop.refused(Kind.SLOT_FOREIGN).hint
        shop.pg.execute("select pg_drop_replication_slot(%s)", [shop.section.slot])
        assert "path" in shop.refused(Kind.SINK_FOREIGN).hint
        shop.sink["path"] = "./new lake"
    shop.run()
    shop.require_equal("orders")


@pytest.mark.follows("log_foreign")
@pytest.mark.parametrize("way", ["slot corrected", "log of its own"])
def test_a_log_of_another_slot(shop: Shop, way: str) -> None:
    shop.create_orders()
    shop.run()
    shop.source["slot"] = f"{shop.section.slot}_2"
    shop.pg.execute("delete from orders where id = 1")
    error = shop.refused(Kind.LOG_FOREIGN)
    assert error.hint.startswith("restore source.slot, or the pipeline's name")
    assert error.hint.endswith("or give this pipeline a log of its own")
    if way == "slot corrected":
        del shop.source["slot"]
    else:
        shop.log["path"] = "./own log"
        assert "path" in shop.refused(Kind.SINK_FOREIGN).hint
        shop.sink["path"] = "./own lake"
    shop.run()
    shop.require_equal("orders")


# ---------------------------------------------------------------------- a damaged target


@pytest.mark.follows("sink_damaged")
@pytest.mark.parametrize("way", ["restored", "empty path"])
def test_a_damaged_file_of_a_target(shop: Shop, way: str) -> None:
    shop.create_orders()
    shop.run()
    path = shop.lake / "_tailrace" / "identity.json"
    kept = path.read_bytes()
    flip(path, 8)
    shop.pg.execute("delete from orders where id = 1")
    error = shop.refused(Kind.SINK_DAMAGED)
    if way == "restored":
        assert "restore this file from a backup" in error.hint
        assert error.context["file"] == str(path)
        path.write_bytes(kept)
    else:
        assert "give the sink a new, empty path and let it read the log from its start" in error.hint
        shop.sink["path"] = "./new lake"
    shop.run()
    shop.require_equal("orders")


@pytest.mark.follows("sink_damaged")
def test_a_target_in_which_an_earlier_version_moved_folders(shop: Shop) -> None:
    shop.create_orders()
    shop.run()
    moves = shop.lake / "_tailrace" / "moves.json"
    moves.write_bytes(durable.encode_state({"moves": [["public.a", "public.b"]]}))
    shop.pg.execute("delete from orders where id = 1")
    error = shop.refused(Kind.SINK_DAMAGED)
    assert "or begin with another log, and an empty path for the sink" in error.hint
    shop.begin_with_a_new_log()
    shop.run()
    shop.require_equal("orders")


@pytest.mark.follows("sink_damaged")
@pytest.mark.parametrize("way", ["read again", "empty path"])
def test_a_table_of_a_mirror_that_was_removed(shop: Shop, way: str) -> None:
    shop.create_orders()
    shop.run()
    shutil.rmtree(shop.lake / "public.orders")
    shop.pg.execute("delete from orders where id = 1")
    error = shop.refused(Kind.SINK_DAMAGED)
    if way == "read again":
        found = re.search(r"`(tailrace snapshot .*?)`", error.hint)
        assert found is not None
        shop.command(found[1])
    else:
        assert "give the sink a new, empty path" in error.hint
        shop.sink["path"] = "./new lake"
    shop.run()
    shop.require_equal("orders")


@pytest.mark.follows("sink_damaged")
def test_a_mirror_by_full_rows_that_lacks_a_row(shop: Shop) -> None:
    shop.pg.execute("create table visits(host text, n int); alter table visits replica identity full")
    shop.pg.execute("insert into visits values ('a', 1), ('a', 1), ('b', 2)")
    shop.sink["keyless"] = "full_row"
    shop.source["snapshot"] = "never"
    shop.run()
    shop.pg.execute("delete from visits where host = 'b'")
    error = shop.refused(Kind.SINK_DAMAGED)
    assert "give the sink a new, empty path and a log with a snapshot" in error.hint
    del shop.source["snapshot"]
    shop.begin_with_a_new_log()
    shop.run()
    shop.require_equal("visits")


@pytest.mark.follows("sink_damaged")
def test_files_of_a_committed_range_are_missing(shop: Shop) -> None:
    shop.sink |= {"type": "parquet"}
    del shop.sink["mode"]
    shop.create_orders()
    shop.run()
    shop.pg.execute("update orders set n = 0 where id = 1")
    failpoints.arm("sink.after_commit=error")
    try:
        with pytest.raises(failpoints.FailpointError):
            shop.run()
    finally:
        failpoints.arm("")
    for path in (shop.lake / "_tailrace" / "staging").rglob("*.parquet"):
        path.unlink()
    error = shop.refused(Kind.SINK_DAMAGED)
    assert error.hint == "give the sink a new, empty path and let it read the log from its start"
    shop.sink["path"] = "./new lake"
    shop.run()
    found = pyarrow.parquet.read_table(shop.lake / "public.orders").sort_by("_log_offset")
    last = dict(zip(found["id"].to_pylist(), found["n"].to_pylist(), strict=True))
    assert last == dict(shop.pg.query("select id, n from orders"))
