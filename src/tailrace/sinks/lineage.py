"""Which table of the source each folder of a mirror is, though tables change their names.

A relation keeps its oid when it is renamed; a table that is dropped and created again is another
relation of the same name. So the rows of a folder belong to a relation, and the folder's place
follows the relation's name. A rename shows with a relation's next row: one whose name another
has got by then, and that is not known to be gone, is parked until its own next row tells.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tailrace.sinks import layout
from tailrace.sinks.write_files import StagedFile


@dataclass(frozen=True, slots=True)
class Lineage:
    """What a range brings to one relation: its files in log order, whatever it was called."""

    relation: int
    directory: str  # by its last name
    files: tuple[StagedFile, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """A relation's folder gets another name, which no folder has then that has no move of its own
    and is not dead.
    """

    relation: int
    source: str
    target: str


@dataclass(slots=True)
class _Course:
    """Where relations are, on the way through the range."""

    directories: dict[int, str | None]  # None: the relation is gone
    files: dict[int, list[StagedFile]] = field(default_factory=dict)

    def take(self, file: StagedFile) -> None:
        oid = file.relation.oid
        if self.directories.get(oid) != file.directory and file.relation.replaced:
            replaced, name = file.relation.replaced, file.relation.replaced_name
            if name is None:
                self.directories[replaced] = None
            elif replaced in self.directories:
                self._put(replaced, layout.table_directory(*name))
        self._put(oid, file.directory)
        self.files.setdefault(oid, []).append(file)

    def _put(self, relation: int, goal: str) -> None:
        for other, directory in self.directories.items():
            if directory == goal and other != relation:
                self.directories[other] = layout.parked_directory(other)  # two can't have one name
        self.directories[relation] = goal


def trace(files: Sequence[StagedFile], holders: Mapping[str, int]) -> tuple[list[Lineage], list[Move]]:
    """Return what the range brings to each relation that is there at its end, and the folders
    that get other names.

    :param files: in any order.
    :param holders: the relation whose rows each folder of the target has, where that is known,
        those that are parked among them.
    """
    course = _Course({oid: directory for directory, oid in holders.items()})
    for file in sorted(files, key=lambda file: file.first):
        course.take(file)
    lineages = [
        Lineage(oid, directory, tuple(held))
        for oid, held in course.files.items()
        if (directory := course.directories[oid]) is not None
    ]
    moves = [
        Move(oid, directory, goal)
        for directory, oid in holders.items()
        if (goal := course.directories[oid]) is not None and goal != directory
    ]
    return lineages, moves
