"""Reads everything in a log and lists all damage. Changes nothing.

Every byte of the identity, of state files, of registered readers, of end marks and of segments
is under a checksum, and what the headers say of the frames is compared with the frames.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from tailrace.changelog import durable, endmark, index
from tailrace.changelog import format as codec
from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.endmark import MARK_NAME
from tailrace.changelog.format import BlockHeader, DamageError, SegmentHeader
from tailrace.changelog.index import Block, SegmentFile, Walk
from tailrace.changelog.retention.readers import READERS
from tailrace.changelog.runs import RunBuilder
from tailrace.errors import Kind, TailraceError
from tailrace.protocol import frames

_STATE_SUFFIXES = (".state", ".state" + durable.PREVIOUS_SUFFIX)


@dataclass(frozen=True, slots=True)
class Damage:
    """A place in a file whose content is not what was written."""

    file: str  # inside the log's directory
    byte: int
    what: str


@dataclass(slots=True)
class VerifyReport:
    """The result of a check: counts, the damage, and `notes` on what is unusual but not damage."""

    path: str
    problems: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tasks: int = 0
    segments: int = 0
    blocks: int = 0
    units: int = 0
    rows: int = 0
    size_bytes: int = 0

    @property
    def sound(self) -> bool:
        return not self.problems


def verify(path: Path | str) -> VerifyReport:
    """Check a whole log, byte for byte. Its pipeline may be running.

    :raises TailraceError: `LOG_MISSING`, if there is no log; `LOG_FORMAT_UNKNOWN`.
    """
    path = Path(path).absolute()
    report = VerifyReport(str(path))
    try:
        log = LogDirectory.open(path)
    except TailraceError as error:
        if error.kind is not Kind.LOG_CORRUPT:
            raise
        report.problems.append(Damage("identity.json", 0, error.message))
        report.notes.append("nothing else can be checked without the identity")
        return report
    # A running pipeline may remove folders meanwhile, which `os.walk` ignores.
    for file in sorted(Path(folder, name) for folder, _, names in os.walk(path) for name in names):
        inside = file.relative_to(path)
        if inside.parts[0] == READERS or file.name.endswith(_STATE_SUFFIXES):
            _check_state(report, file, str(inside))
    for task in log.tasks():
        report.tasks += 1
        _TaskCheck(report, log, task).run()
    return report


def _check_state(report: VerifyReport, file: Path, inside: str) -> None:
    if file.name.startswith("."):
        return
    with contextlib.suppress(FileNotFoundError):  # replaced by a new generation meanwhile
        if durable.decode_state(file.read_bytes()) is None:
            report.problems.append(Damage(inside, 0, "it does not match its checksum"))


class _TaskCheck:
    """The check of one task's end mark and segments."""

    def __init__(self, report: VerifyReport, log: LogDirectory, task: str) -> None:
        self._report, self._log, self._task = report, log, task
        self._path = log.task_path(task)
        self._seed = codec.seed_of(log.identity.log_id, task)
        self._durable_to = 0

    def run(self) -> None:
        self._check_mark()
        offsets = self._log.segments(self._task)
        before: tuple[Path, Walk] | None = None
        for offset, following in zip(offsets, [*offsets, None][1:], strict=True):
            path = self._path / codec.segment_name(offset)
            try:
                file = SegmentFile.open(path, self._seed, bytes.fromhex(self._log.identity.log_id))
            except DamageError as error:
                self._problem(path, 0, str(error))
                before = None
                continue
            except FileNotFoundError:
                self._report.notes.append(f"{path.name} was removed by retention meanwhile")
                before = None
                continue
            try:
                self._check_link(before, path, file.header)
                before = path, self._check_segment(file, following)
            finally:
                file.close()
        self._check_end(before)

    def _check_mark(self) -> None:
        path = self._path / MARK_NAME
        try:
            marks, damage = endmark.read_slots(path.read_bytes(), self._seed)
        except FileNotFoundError:
            self._problem(path, 0, "the end mark is missing; the next writer creates it again")
            return
        for at, what in damage:
            self._problem(path, at, what)
        self._durable_to = max((mark.offset for mark in marks), default=0)

    def _check_link(self, before: tuple[Path, Walk] | None, path: Path, head: SegmentHeader) -> None:
        if before is None:
            return
        walk = before[1]
        found = (head.first_offset, head.chain, head.position)
        if found != (walk.offset, walk.chain, walk.position):
            self._problem(path, 0, f"the segment does not continue {before[0].name}")

    def _check_end(self, last: tuple[Path, Walk] | None) -> None:
        end = last[1].offset if last else 0
        if end < self._durable_to:
            path, at = (last[0], last[1].file_at) if last else (self._path / MARK_NAME, 0)
            self._problem(path, at, f"the log ends at offset {end}, but was durable up to {self._durable_to}")

    def _check_segment(self, file: SegmentFile, until: int | None) -> Walk:
        self._report.segments += 1
        self._report.size_bytes += file.size()
        walk, builder = file.start(), RunBuilder(file.path.name)
        reached, wrong = -1, None
        while reached != walk.file_at:  # a writer may append blocks, and then the footer, meanwhile
            reached = walk.file_at
            if not self._check_to_the_end(file, walk, until, builder):
                return walk
            wrong = _footer_problem(file, walk, builder, sealed=until is not None)
            if wrong is None or until is not None:
                break
        if wrong is not None:
            self._problem(file.path, walk.file_at, wrong)
        return walk

    def _check_to_the_end(
        self, file: SegmentFile, walk: Walk, until: int | None, builder: RunBuilder
    ) -> bool:
        """Check the blocks from the walk's position on; return whether a footer may follow."""
        while (error := self._check_blocks(file, walk, until, builder)) is not None:
            resume = index.find_block(file, walk.file_at + 1)
            if until is None and resume is None and self._is_torn(file, walk):
                self._report.notes.append(
                    f"{file.path.name} ends in an unfinished block at byte {walk.file_at}, which was "
                    "never acknowledged; the next writer cuts it off"
                )
                return False
            if not self._grew(file, walk):
                self._problem(file.path, walk.file_at, str(error))
                if resume is None or index.footer_starts(file, resume):
                    return False
                _go_on_at(file, walk, resume)
        return True

    def _is_torn(self, file: SegmentFile, walk: Walk) -> bool:
        """Return whether a block is incomplete because of a write in progress, a crash or a power failure."""
        return walk.offset >= self._durable_to and not index.footer_remains(file, walk.file_at)

    def _check_blocks(
        self, file: SegmentFile, walk: Walk, until: int | None, builder: RunBuilder
    ) -> DamageError | None:
        try:
            # Only the last block of the log may be torn, even if its header is complete.
            for block in index.walk_blocks(file, walk, until, payloads=until is None):
                self._check_block(file, block)
                if not block.header.preamble:
                    builder.add(*block)
        except DamageError as error:
            return error
        return None

    def _grew(self, file: SegmentFile, walk: Walk) -> bool:
        """Return whether the writer has meanwhile completed the block at the walk's position."""
        try:
            next(index.walk_blocks(file, replace(walk), None, payloads=True))
        except (DamageError, StopIteration):
            return False
        return True

    def _check_block(self, file: SegmentFile, block: Block) -> None:
        header = block.header
        self._report.blocks += 1
        self._report.units += header.units
        self._report.rows += header.rows
        try:
            raw = file.payload(block)
            if not header.preamble:
                _check_facts(header, raw)
        except DamageError as error:
            self._problem(file.path, block.file_at + header.header_size, str(error))

    def _problem(self, path: Path, byte: int, what: str) -> None:
        inside = str(path.relative_to(self._log.path))
        self._report.problems.append(Damage(inside, byte, what))


def _footer_problem(file: SegmentFile, walk: Walk, builder: RunBuilder, *, sealed: bool) -> str | None:
    """Return what is wrong with the footer after the last block; `None` if nothing is."""
    if walk.file_at == file.size() and not sealed:
        return None
    try:
        refs, end, footer_at = index.read_footer(file)
        if footer_at != walk.file_at or end != walk.offset or refs != builder.refs():
            raise DamageError("the footer does not match the blocks before it")
    except DamageError as error:
        return f"{error}; readers do not need it"
    return None


def _go_on_at(file: SegmentFile, walk: Walk, file_at: int) -> None:
    """Move the walk to a block after damage, as if everything before that block were sound."""
    data = durable.read_fully(file.fd, codec.BLOCK_HEADER_SIZE_MAX, file_at)
    header = codec.decode_block_header(data, 0, file.seed)
    walk.file_at, walk.offset, walk.chain = file_at, header.log_offset, header.chain
    walk.position, walk.expects_preamble = header.position_at_start, header.preamble


def _check_facts(header: BlockHeader, raw: frames.Bytes) -> None:
    """Compare a block's header with its frames.

    :raises DamageError: if they differ.
    """
    state = frames.state_within(
        header.open_at_start, header.position_at_start, header.position_time_at_start_us
    )
    try:
        summary = frames.summarise(raw, state)
    except TailraceError as error:
        raise DamageError(f"a block's frames are invalid: {error.message}") from None
    says = (
        (header.rows, header.units, header.has_schema, header.tables),
        (header.position, header.position_time_us, header.open_at_end),
    )
    found = (
        (summary.rows, summary.units, summary.has_schema, summary.tables),
        (summary.position, summary.position_time_us, summary.open_at_end),
    )
    if says != found or summary.boundary not in {None, header.raw_size}:
        raise DamageError("a block's header does not match its frames")
