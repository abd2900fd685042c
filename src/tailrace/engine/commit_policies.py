"""Commit policies: they decide when committable offsets are committed. The caller passes the elapsed time.

A policy is asked after each batch and while no records arrive (`contracts.CommitPolicy`). A user's policy is
any object with `is_due`; `AllOf` and `AnyOf` combine policies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tailrace.engine.contracts import CommitPolicy


@dataclass(frozen=True, slots=True)
class Always:
    """Commits after each batch."""

    def is_due(self, processed: int, at_transaction_end: bool, since_commit_s: float) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Periodic:
    """Commits when `interval_s` have passed since the last commit; also while no records arrive."""

    interval_s: float = 60.0

    def is_due(self, processed: int, at_transaction_end: bool, since_commit_s: float) -> bool:
        return since_commit_s >= self.interval_s


@dataclass(frozen=True, slots=True)
class EveryRecords:
    """Commits when `count` records or more were processed since the last commit."""

    count: int

    def is_due(self, processed: int, at_transaction_end: bool, since_commit_s: float) -> bool:
        return processed >= self.count


@dataclass(frozen=True, slots=True)
class AtTransactionEnds:
    """Commits where no transaction of the source is open: never within a transaction."""

    def is_due(self, processed: int, at_transaction_end: bool, since_commit_s: float) -> bool:
        return at_transaction_end


@dataclass(frozen=True, slots=True, init=False)
class AllOf:
    """Commits when all of `policies` want it."""

    policies: tuple[CommitPolicy, ...]

    def __init__(self, *policies: CommitPolicy) -> None:
        object.__setattr__(self, "policies", policies)

    def is_due(self, processed: int, at_transaction_end: bool, since_commit_s: float) -> bool:
        # All are asked: a policy that counts calls must not miss any.
        wanted = [p.is_due(processed, at_transaction_end, since_commit_s) for p in self.policies]
        return all(wanted)


@dataclass(frozen=True, slots=True, init=False)
class AnyOf:
    """Commits when at least one of `policies` wants it."""

    policies: tuple[CommitPolicy, ...]

    def __init__(self, *policies: CommitPolicy) -> None:
        object.__setattr__(self, "policies", policies)

    def is_due(self, processed: int, at_transaction_end: bool, since_commit_s: float) -> bool:
        wanted = [p.is_due(processed, at_transaction_end, since_commit_s) for p in self.policies]
        return any(wanted)


#: Factories of the policies that the option `offset_commit.policy` names, from `interval_s` and `records`.
#: `transaction` commits at most every `interval_s`: each end of a transaction would be far too often.
BY_NAME: dict[str, Callable[[float, int], CommitPolicy]] = {
    "always": lambda _interval_s, _records: Always(),
    "periodic": lambda interval_s, _records: Periodic(interval_s),
    "count": lambda _interval_s, records: EveryRecords(records),
    "transaction": lambda interval_s, _records: AllOf(AtTransactionEnds(), Periodic(interval_s)),
}
