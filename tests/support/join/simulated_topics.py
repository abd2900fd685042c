"""In-memory topics as Debezium writes them exactly once: with open, committed and aborted Kafka transactions,
whose end markers reach one partition after the other, and gaps left by compaction.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pyarrow as pa

from tailrace.join.extraction import MESSAGES
from tailrace.join.planning import ClusterState, Ends, Place

TRANSACTIONS: Place = ("t.transaction", 0)


@dataclass
class _Partition:
    # Offset and document of each record; None: an end marker of a Kafka transaction.
    records: list[tuple[int, dict | None]] = field(default_factory=list)
    end: int = 0
    open_from: int | None = None
    aborted: set[int] = field(default_factory=set)  # what compaction removed

    @property
    def committed(self) -> int:
        return self.end if self.open_from is None else self.open_from

    def append(self, document: dict | None) -> None:
        self.records.append((self.end, document))
        if document is not None and self.open_from is None:
            self.open_from = self.end
        self.end += 1

    def close(self, *, keep: bool) -> None:
        if self.open_from is not None:
            if not keep:
                self.aborted.update(range(self.open_from, self.end))
            self.append(None)
            self.open_from = None


class SimulatedTopics:
    """Data partitions and a transaction topic that grow step by step at random.

    :param postgres: whether transactions have positions.
    """

    def __init__(self, rng: random.Random, partitions: int, *, postgres: bool) -> None:
        self._rng, self._postgres = rng, postgres
        self.data = {("t.a", number): _Partition() for number in range(partitions)}
        self.transactions = _Partition()
        self.counts: dict[str, int] = {}
        self._lsn, self._number = 1000, 0
        self._midway = self._crosses = False
        self._steps = self._produced()

    def step(self) -> None:
        """Do one step: write a record, or the end marker of a Kafka transaction in one partition."""
        next(self._steps)

    def settle(self) -> None:
        """Go on until no transaction is open."""
        while any(each.open_from is not None for each in self._all()) or self._midway:
            self.step()

    def grow(self) -> None:
        """Add a partition."""
        self.data["t.a", len(self.data)] = _Partition()

    def state(self, between: Callable[[], None] = lambda: None) -> ClusterState:
        """Return the answers of a cluster.

        :param between: called between the answers, so that something may happen there.
        """
        own = self.transactions
        transactions = Ends(0, own.committed, own.committed)
        between()
        data = {place: Ends(0, 0, each.end) for place, each in self.data.items()}
        between()
        data = {place: replace(ends, committed=self.data[place].committed) for place, ends in data.items()}
        return ClusterState(transactions, {"t.a": "1", TRANSACTIONS[0]: "2"}, data)

    def messages(self, place: Place, first: int, count: int) -> pa.RecordBatch:
        """Return up to `count` committed records from an offset on."""
        partition = self.transactions if place == TRANSACTIONS else self.data[place]
        found = [
            (offset, document)
            for offset, document in partition.records[first : partition.committed]
            if document is not None and offset not in partition.aborted
        ][:count]
        rows = [
            {"key": b"k", "value": json.dumps(document).encode(), "offset": offset, "timestamp_ms": 1}
            for offset, document in found
        ]
        return pa.RecordBatch.from_pylist(rows, MESSAGES)

    def changes(self, place: Place) -> list[tuple[int, str | None]]:
        """Return offset and transaction of each committed row of a partition whose END is committed."""
        partition = self.data[place]
        ended = {
            document["id"]
            for offset, document in self.transactions.records[: self.transactions.committed]
            if document and document["status"] == "END" and offset not in self.transactions.aborted
        }
        found = []
        for offset, document in partition.records[: partition.committed]:
            if document is None or offset in partition.aborted:
                continue
            name = document["own"]
            if name is not None and name not in ended:
                break
            found.append((offset, name))
        return found

    def _all(self) -> list[_Partition]:
        return [self.transactions, *self.data.values()]

    def _produced(self) -> Iterator[None]:
        rng = self._rng
        while True:
            self._midway = True
            begun, self._crosses = (self._lsn, self._number), False
            names = len(self.counts)
            for _ in range(rng.randint(1, 4)):
                yield from self._source_transaction()
            keep = rng.random() < 0.8 or self._crosses
            if not keep:
                self._lsn, self._number = begun
                for name in list(self.counts)[names:]:
                    del self.counts[name]
            for partition in rng.sample(self._all(), len(self._all())):
                partition.close(keep=keep)
                yield
            self._midway = False
            yield

    def _source_transaction(self) -> Iterator[None]:
        # Sometimes spread over two Kafka transactions; the first one is always committed then.
        rng = self._rng
        self._number += 1
        rows = rng.choice([0, 1, 2, 3, 8])
        before, self._lsn = self._lsn, self._lsn + 10 * (rows + 1)
        name = f"{700 + self._number}:{self._lsn}" if self._postgres else f"file:{self._number}"
        self.counts[name] = rows
        snapshot = rng.random() < 0.15
        splits = [self._row(name, order, before) for order in range(1, rows + 1)]
        if snapshot:
            splits.insert(rng.randint(0, len(splits)), {"own": None, "op": "r"})
        cut = rng.randint(1, len(splits)) if splits and rng.random() < 0.3 else None
        for at, document in enumerate(splits):
            if at == cut:
                for partition in rng.sample(self._all(), len(self._all())):
                    partition.close(keep=True)
                    yield
                self._crosses = True
            partition = rng.choice(list(self.data.values()))
            if rng.random() < 0.05:
                partition.aborted.add(partition.end)  # compaction removed it before it was read
            partition.append(document)
            yield
        end = {"status": "END", "id": name, "event_count": rows, "ts_ms": 5}
        if rng.random() < 0.5:
            self.transactions.append({"status": "BEGIN", "id": name, "ts_ms": 4})
        self.transactions.append(end)
        yield

    def _row(self, name: str, order: int, before: int) -> dict:
        number = name.split(":", maxsplit=1)[0]
        own = f"{number}:{before + order}" if self._postgres else name
        source = {"sequence": json.dumps([str(before), str(before + order)], separators=(",", ":"))}
        return {
            "own": name,
            "op": "c",
            "source": source if self._postgres else {},
            "transaction": {"id": own, "total_order": order},
        }
