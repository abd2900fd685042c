"""Markers: their form in the log; readers that do not know them skip them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tailrace.changelog.reader import LogReader
from tailrace.changelog.writer import LogWriter
from tailrace.protocol import frames
from tailrace.ranges.changes import decoded_batches
from tailrace.ranges.plan import InputSplit
from tailrace.realtime.switching import Marker, MarkerKind
from tests.support.changelog.frames_of import Source, append, new_log, relation_frame
from tests.support.realtime.markers import markers_in

MARKERS = st.one_of(
    st.builds(Marker, st.just(MarkerKind.TRY_START_REALTIME), st.text(max_size=20)),
    st.builds(
        Marker,
        st.sampled_from([MarkerKind.REALTIME, MarkerKind.STOP_REALTIME]),
        st.text(max_size=20),
        st.integers(0, 1 << 62),
    ),
)


@given(st.lists(st.one_of(MARKERS, st.integers(0, 3))))
def test_markers_are_found_among_transactions_with_their_ends(content: list[Marker | int]) -> None:
    source, parts, wanted = Source(), [], []
    for each in content:
        parts.append(source.transaction(each) if isinstance(each, int) else each.frame(source.lsn, 0))
        if isinstance(each, Marker):
            wanted.append((sum(map(len, parts)), each))
    raw = np.frombuffer(b"".join(parts), np.uint8)
    assert markers_in(raw) == wanted


def test_readers_without_knowledge_of_markers_read_the_changes_around_them(tmp_path: Path) -> None:
    log, source = new_log(tmp_path / "log"), Source()
    with LogWriter.open(log, "0") as writer:
        append(writer, relation_frame(), source.transaction(2))
        for kind in MarkerKind:
            tail = writer.tail
            number = -1 if kind is MarkerKind.TRY_START_REALTIME else tail.offset
            append(writer, Marker(kind, "engine:shop", number).frame(tail.position, tail.position_time_us))
            assert writer.sync().offset > tail.offset
            append(writer, source.transaction(1))
        end = writer.sync().offset
        with LogReader.open(log, "0") as reader:
            split = InputSplit("0", 0, 0, end, tuple(reader.blocks(0, end)))
            assert sum(each.count for found in decoded_batches(reader, split) for each in found.changes) == 5
            assert len(reader.boundaries(0, end)) == 7
            found = [marker for ref in reader.blocks(0, end) for _, marker in markers_in(reader.read(ref))]
    assert [marker.kind for marker in found] == list(MarkerKind)


def test_progress_frames_with_no_or_other_content_are_no_markers() -> None:
    said = [
        frames.control_frame(frames.PROGRESS, 1, 0, content) for content in ({}, {"of": "a later version"})
    ]
    assert markers_in(np.frombuffer(b"".join(said), np.uint8)) == []
