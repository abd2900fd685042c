"""Which folder of a mirror gets a relation's rows, and which relations must be read again."""

from __future__ import annotations

import pytest

from tailrace.model import Relation, ReplicaIdentity
from tailrace.protocol.facts import Facts
from tailrace.sinks.delta.table_identity import Displaced, Holder, name_now, place
from tailrace.sinks.write_job import StagedFile

A, B, C = 11, 12, 13
HOLDERS = {"public.a": Holder(A, 5), "public.b": Holder(B, 7)}


def staged(first: int, oid: int, table: str) -> StagedFile:
    held = Relation(oid, "public", table, ReplicaIdentity.DEFAULT, ())
    return StagedFile(held, held, first, f"public.{table}", f"f{first}", 1, 1, b"", {})


def facts(oid: int, table: str, version: int, replaced: int = 0, name: str | None = None) -> Facts:
    called = None if name is None else ("public", name)
    return Facts(oid, "public", table, (), version=version, replaced=replaced, replaced_name=called)


@pytest.mark.parametrize(
    ("files", "holders", "folders", "displaced"),
    [
        pytest.param([staged(8, A, "a")], HOLDERS, {A: "a"}, {}, id="the same"),
        pytest.param([staged(8, A, "c")], HOLDERS, {A: "c"}, {A: ("a", 3)}, id="renamed"),
        pytest.param(
            [staged(8, B, "a")], HOLDERS, {B: "a"}, {A: ("a", 3), B: ("b", 3)}, id="the name of another"
        ),
        pytest.param(
            [staged(8, B, "a"), staged(9, A, "b")],
            HOLDERS,
            {B: "a", A: "b"},
            {A: ("a", 3), B: ("b", 3)},
            id="swapped",
        ),
        pytest.param(
            [staged(8, 13, "a")], HOLDERS, {13: "a"}, {A: ("a", 3)}, id="a new table, another's name"
        ),
        pytest.param(
            [staged(8, A, "a"), staged(9, A, "c")], {}, {A: "c"}, {}, id="renamed before it was held"
        ),
        pytest.param(
            [staged(8, A, "a"), staged(9, B, "a")],
            {},
            {B: "a"},
            {A: ("a", 9)},
            id="replaced before it was held",
        ),
        pytest.param(
            [staged(8, A, "b")],
            {"public.a": Holder(B, 8), "public.b": Holder(B, 7)},
            {A: "b"},
            {},
            id="a folder that was left behind is nobody's",
        ),
        pytest.param(
            [staged(8, A, "a")],
            {"public.a": Holder(B, 20)},
            {},
            {},
            id="rows from before another took the name, in a range that was written in part",
        ),
    ],
)
def test_each_relation_gets_the_folder_of_its_current_name(files, holders, folders, displaced):
    found = place(files, holders, 3)
    assert {held[0].relation.oid: directory for directory, held in found.tables} == {
        oid: f"public.{name}" for oid, name in folders.items()
    }
    assert found.displaced == {
        oid: Displaced(f"public.{name}", since) for oid, (name, since) in displaced.items()
    }


def test_a_relation_keeps_its_last_name_until_another_relation_has_it():
    own = facts(A, "a", 1)
    assert name_now(own, [own]) == ("public", "a")
    assert name_now(own, [own, facts(B, "a", 2, A, "x")]) == ("public", "x")
    assert name_now(own, [own, facts(B, "a", 2, A)]) is None
    # A third one has its last name: it was dropped, or has another name.
    third = facts(C, "x", 1)
    assert name_now(own, [own, facts(B, "a", 2, A, "x"), third]) is None
    assert name_now(own, [third, own, facts(B, "a", 2, A, "x")]) == ("public", "x")
    # It took the name back from the other relation.
    again = facts(A, "a", 3, B, "b")
    assert name_now(again, [facts(B, "a", 2, A, "x"), again]) == ("public", "a")
