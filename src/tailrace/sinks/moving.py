"""Folders of a mirror that get other names, as tables of the source do.

What is to be moved is written down first. Each folder then goes to a place of its own and from
there to its new name, so that two may change places; each step looks whether it was done. A
process that dies on the way leaves the rest to the next that opens the sink.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from tailrace import failpoints
from tailrace.changelog import durable
from tailrace.sinks.delta_folder import DeltaFolder
from tailrace.sinks.lineage import Move
from tailrace.sinks.target import Target, remove_folder, writing

_MOVES = "moves.json"
_PLACE = "moving"


def move(target: Target, moves: Sequence[Move]) -> None:
    """Move folders, each with its transactions kept under its new name already.

    :raises TailraceError: `SINK_WRITE_FAILED`; the next `finish_moves` goes on.
    """
    target.write(_MOVES, {"moves": [asdict(each) for each in moves]})
    finish_moves(target)


def finish_moves(target: Target) -> None:
    """Do what is left of moves that were begun; nothing, as a rule.

    :raises TailraceError: `SINK_WRITE_FAILED`, `SINK_DAMAGED`.
    """
    begun = [Move(**each) for each in (target.read(_MOVES) or {}).get("moves", [])]
    if not begun:
        return
    with writing(target.sink, "move a table's folder to its new name"):
        place = target.state / _PLACE
        place.mkdir(exist_ok=True)
        for each in begun:
            source = target.path / each.source
            if DeltaFolder(source, target.sink, each.source, "").relation() == each.relation:
                source.replace(place / str(each.relation))
        failpoints.hit("sink.in_move")
        for each in begun:
            waiting = place / str(each.relation)
            if waiting.exists():
                remove_folder(target.path / each.target)  # of a table that is gone in the source
                (target.path / each.target).parent.mkdir(exist_ok=True)
                waiting.replace(target.path / each.target)
        for directory in {place, target.path, *((target.path / each.target).parent for each in begun)}:
            durable.sync_directory(directory)
    target.write(_MOVES, {"moves": []})
