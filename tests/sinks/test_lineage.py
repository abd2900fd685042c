"""Where the folders of a mirror go when tables change names."""

from __future__ import annotations

from pathlib import Path

from sinks.rig import mirror_rows, opened, relation, write
from spark.wire import INT8, TEXT, HandmadeLog, insert
from tailrace.model import Relation, ReplicaIdentity
from tailrace.sinks.lineage import Move, trace
from tailrace.sinks.write_files import StagedFile

A, B, C = 11, 12, 13
HOLDERS = {"public.a": A, "public.b": B, "public.c": C}


def staged(first: int, oid: int, table: str, replaced: int = 0, now: str | None = None) -> StagedFile:
    """Return a file of a relation's rows; `now` is what the one that it replaced is called."""
    held = Relation(
        oid, "public", table, ReplicaIdentity.DEFAULT, (),
        replaced=replaced, replaced_name=None if now is None else ("public", now),
    )  # fmt: skip
    return StagedFile(held, held, first, f"public.{table}", f"f{first}", 1, 1, b"", {})


def moves(*files: StagedFile, holders: dict[str, int] = HOLDERS) -> set[Move]:
    return set(trace(files, holders)[1])


def test_tables_that_change_names_move_together_where_the_log_tells_both_names() -> None:
    told = staged(1, B, "a", replaced=A, now="b")
    assert moves(told) == {Move(B, "public.b", "public.a"), Move(A, "public.a", "public.b")}


def test_one_whose_name_another_has_is_parked_until_its_own_rows_come() -> None:
    parked = f"_tailrace/parked/{A}"
    assert moves(staged(1, B, "a")) == {Move(B, "public.b", "public.a"), Move(A, "public.a", parked)}
    held = {"public.a": B, parked: A, "public.c": C}
    assert moves(staged(2, A, "b"), holders=held) == {Move(A, parked, "public.b")}


def test_of_three_that_are_turned_about_nobodys_rows_are_lost() -> None:
    # a is called b by now, b is called c and c is called a; only c's rows have come.
    found = moves(staged(1, C, "a", replaced=A, now="b"))
    assert found == {
        Move(C, "public.c", "public.a"),
        Move(A, "public.a", "public.b"),
        Move(B, "public.b", f"_tailrace/parked/{B}"),
    }
    held = {"public.a": C, "public.b": A, f"_tailrace/parked/{B}": B}
    assert moves(staged(2, B, "c"), holders=held) == {Move(B, f"_tailrace/parked/{B}", "public.c")}


def test_one_that_is_gone_makes_room() -> None:
    assert moves(staged(1, B, "a", replaced=A)) == {Move(B, "public.b", "public.a")}


def test_rows_of_one_that_lost_its_name_in_the_same_range_are_kept() -> None:
    lineages, _ = trace([staged(1, A, "a"), staged(2, B, "a")], HOLDERS)
    assert {each.relation: each.directory for each in lineages} == {
        A: f"_tailrace/parked/{A}",
        B: "public.a",
    }


def test_rows_of_a_parked_table_come_back_with_it(tmp_path: Path) -> None:
    columns = {"id": INT8, "note": TEXT}
    parked = []
    with HandmadeLog(tmp_path / "log") as log:
        begun = [
            frame
            for oid, name in ((A, "a"), (B, "b"), (C, "c"))
            for frame in (relation(oid, f"public.{name}", columns), insert(oid, 1, f"was {name}"))
        ]
        at = log.commit(*begun)
        sink = opened("mirror", tmp_path / "lake", log)
        write(sink, log, 0, at)
        # WHEN the three are turned about, and the log tells of each as its rows come
        for oid, name in ((C, "a"), (A, "b"), (B, "c")):
            upto = log.commit(relation(oid, f"public.{name}", columns), insert(oid, 2, "later"))
            sink.close()
            sink = opened("mirror", tmp_path / "lake", log)
            write(sink, log, at, upto)
            at = upto
            parked.append(
                sorted(path.name for path in (tmp_path / "lake" / "_tailrace" / "parked").iterdir())
            )
    sink.close()
    assert parked == [[str(A)], [str(B)], []]
    for name, before in (("a", "c"), ("b", "a"), ("c", "b")):
        rows = mirror_rows(tmp_path / "lake" / f"public.{name}")
        assert rows == [{"id": 1, "note": f"was {before}"}, {"id": 2, "note": "later"}]
