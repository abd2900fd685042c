"""The buffer: ordered, bounded, and durable blocks only."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.changelog.writer import Insertion, LogWriter
from tailrace.protocol import frames
from tailrace.realtime.buffer import BlockBuffer
from tailrace.realtime.handover import Handover
from tailrace.realtime.switching import Marker, MarkerKind
from tests.support.changelog.frames_of import Source, append, new_log, relation_frame
from tests.support.examples import seeds
from tests.support.realtime.markers import markers_in

CAPACITY = 1500
MARKER = Marker(MarkerKind.TRY_START_REALTIME, "c")


def _written(log: LogDirectory, start: int, end: int) -> bytes:
    with LogReader.open(log, "0") as reader:
        refs = reader.blocks(reader.start, reader.end().offset)
        return b"".join(bytes(reader.read(ref)) for ref in refs)[start - reader.start : end - reader.start]


@pytest.mark.parametrize("seed", seeds(20, quick=1))
def test_blocks_are_durable_ordered_and_complete_until_the_buffer_overflows(
    seed: int, tmp_path: Path
) -> None:
    choose, source, buffer = random.Random(seed), Source(), BlockBuffer(CAPACITY)
    log = new_log(tmp_path / "log")
    overflows, reached = 0, None
    with LogWriter.open(log, "0", listener=Handover([buffer], lambda: None)) as writer:
        for _ in range(400):
            match choose.randrange(8):
                case 0 | 1:
                    # In one piece or, as a loaded server sends it, in several; the last one has no row.
                    whole = [source.begin(), *(source.insert() for _ in range(choose.randrange(1, 5)))]
                    whole.append(source.commit())
                    middle = choose.randrange(1, len(whole) + 1)
                    for part in filter(None, (whole[:middle], whole[middle:])):
                        append(writer, *part)
                case 2:
                    append(writer, frames.control_frame(frames.PROGRESS, source.lsn + 9, 0, {}))
                case 3:
                    writer.sync()
                    if choose.random() < 0.3:
                        for block in buffer.take(1 << 20):
                            reached = block.header.end
                        assert buffer.count == 0  # all complete blocks are given out
                case 4:
                    for block in buffer.take(choose.choice([1, 500, 5000])):
                        header = block.header
                        assert reached is not None
                        assert reached <= header.log_offset
                        assert header.end <= writer.durable.offset
                        assert _written(log, header.log_offset, header.end) == bytes(block.frames)
                        assert not block.frames.flags.writeable
                        reached = header.end
                case 5:
                    if buffer.lost or reached is None:
                        overflows += bool(buffer.lost)
                        buffer.fill()
                        reached = writer.offset
                case 6:
                    writer.insert(Insertion(MARKER.frame, rolls=choose.random() < 0.2))
                case 7:
                    append(writer, source.begin(), source.insert())
                    writer.discard_open_unit()
            assert buffer.size_bytes <= CAPACITY
            if buffer.lost:
                assert (buffer.count, buffer.rows, list(buffer.take(1 << 20))) == (0, 0, [])
    assert overflows


def test_blocks_being_processed_count_until_they_are_returned(tmp_path: Path) -> None:
    buffer = BlockBuffer(CAPACITY)
    with LogWriter.open(new_log(tmp_path), "0", listener=Handover([buffer], lambda: None)) as writer:
        buffer.fill()
        append(writer, relation_frame(), Source().transaction(3))
        assert (list(buffer.take(1 << 20)), buffer.rows) == ([], 3)
        writer.sync()
        (block,) = buffer.take(1 << 20)
        assert buffer.size_bytes == len(block.frames)
        buffer.take(1 << 20)
        assert buffer.size_bytes == 0


def test_several_consumers_share_the_same_memory(tmp_path: Path) -> None:
    buffers = [BlockBuffer(CAPACITY), BlockBuffer(CAPACITY), BlockBuffer(CAPACITY)]
    with LogWriter.open(new_log(tmp_path), "0", listener=Handover(buffers, lambda: None)) as writer:
        buffers[0].fill()
        buffers[1].fill()
        append(writer, Source().transaction(3))
        writer.sync()
        first, second = (buffer.take(1 << 20)[0] for buffer in buffers[:2])
        assert first.frames is second.frames
        assert buffers[2].take(1) == []


def test_a_buffer_notices_that_it_missed_a_part_of_the_log(tmp_path: Path) -> None:
    buffer, source = BlockBuffer(CAPACITY), Source()
    log, handover = new_log(tmp_path), Handover([buffer], lambda: None)
    with LogWriter.open(log, "0", listener=handover) as writer:
        buffer.fill()
        append(writer, source.transaction(1))
    with LogWriter.open(log, "0") as writer:
        append(writer, source.transaction(1))
    with LogWriter.open(log, "0", listener=handover) as writer:
        assert len(buffer.take(1 << 20)) == 1
        assert not buffer.lost
        append(writer, source.transaction(1))
        assert buffer.lost


def test_a_block_comes_with_the_tables_description_in_force_before_it(tmp_path: Path) -> None:
    buffer, source = BlockBuffer(CAPACITY), Source()
    with LogWriter.open(new_log(tmp_path), "0", listener=Handover([buffer], lambda: None)) as writer:
        buffer.fill()
        append(writer, relation_frame(), source.transaction(1))
        append(writer, source.transaction(1))
        writer.sync()
        first, second = buffer.take(1 << 20)
        assert (list(first.schema), len(second.schema)) == ([], 1)


def test_a_frame_is_inserted_between_transactions_even_if_no_chunk_ends_at_one(
    tmp_path: Path,
) -> None:
    log, source = new_log(tmp_path), Source()
    with LogWriter.open(log, "0") as writer:
        append(writer, source.begin(), source.insert())
        insertion = Insertion(MARKER.frame, rolls=True)
        writer.insert(insertion)
        assert insertion.end == -1
        append(writer, source.insert())
        assert insertion.end == -1
        append(writer, source.commit(), source.begin(), source.insert())
        assert 0 < insertion.end < writer.offset
        append(writer, source.commit())
        end = writer.sync().offset
        with LogReader.open(log, "0") as reader:
            found = [
                (ref.header.log_offset + at, marker)
                for ref in reader.blocks(0, end)
                for at, marker in markers_in(reader.read(ref))
            ]
            assert found == [(insertion.end, MARKER)]
            assert insertion.end in reader.boundaries(0, end)
            assert sum(ref.header.rows for ref in reader.blocks(0, end)) == 3
        assert len(log.segments("0")) == 2
