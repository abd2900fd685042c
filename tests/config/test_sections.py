"""Sections of the configuration as classes, each of which is completed when it is first used."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from tailrace.config.fields import Section

THREADS = 8


class Inner(Section):
    size: int = 1


def _outer() -> type[Section]:
    class Outer(Section):
        first: Inner = Inner()
        more: tuple[Inner, ...] = ()

    return Outer


def test_many_threads_may_use_a_section_for_the_first_time_at_once() -> None:
    barrier = Barrier(THREADS)

    def used(section: type[Section]) -> object:
        barrier.wait(60)
        return section.model_validate({"first": {"size": 2}, "more": [{}]}).model_dump()

    with ThreadPoolExecutor(THREADS) as pool:
        for _ in range(20):
            found = list(pool.map(used, [_outer()] * THREADS))
            assert found == [{"first": {"size": 2}, "more": ({"size": 1},)}] * THREADS
