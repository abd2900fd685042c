"""When what can be committed is committed. The caller says what has passed: there is no clock here.

A policy is asked after each batch and while nothing comes (`contracts.CommitPolicy`). One's own is
any object with `is_due`; `AllOf` and `AnyOf` put policies together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tailrace.engine.contracts import CommitPolicy


@dataclass(frozen=True, slots=True)
class Always:
    """After each batch."""

    def is_due(self, processed: int, at_transaction_end: bool, since_commit_s: float) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Periodic:
    """When `interval_s` have passed since the last commit; also while nothing comes."""

    interval_s: float = 60.0

    def is_due(self, processed: int, at_transaction_end: bool, since_commit_s: float) -> bool:
        return since_commit_s >= self.interval_s


@dataclass(frozen=True, slots=True)
class EveryRecords:
    """When `count` records or more were processed since the last commit."""

    count: int

    def is_due(self, processed: int, at_transaction_end: bool, since_commit_s: float) -> bool:
        return processed >= self.count


@dataclass(frozen=True, slots=True)
class AtTransactionEnds:
    """Where no transaction of the source is open: what is committed is never part of one."""

    def is_due(self, processed: int, at_transaction_end: bool, since_commit_s: float) -> bool:
        return at_transaction_end


@dataclass(frozen=True, slots=True, init=False)
class AllOf:
    """When all of `policies` want it."""

    policies: tuple[CommitPolicy, ...]

    def __init__(self, *policies: CommitPolicy) -> None:
        object.__setattr__(self, "policies", policies)

    def is_due(self, processed: int, at_transaction_end: bool, since_commit_s: float) -> bool:
        # Each is asked: one that counts calls must not miss any.
        wanted = [p.is_due(processed, at_transaction_end, since_commit_s) for p in self.policies]
        return all(wanted)


@dataclass(frozen=True, slots=True, init=False)
class AnyOf:
    """When one of `policies` wants it."""

    policies: tuple[CommitPolicy, ...]

    def __init__(self, *policies: CommitPolicy) -> None:
        object.__setattr__(self, "policies", policies)

    def is_due(self, processed: int, at_transaction_end: bool, since_commit_s: float) -> bool:
        wanted = [p.is_due(processed, at_transaction_end, since_commit_s) for p in self.policies]
        return any(wanted)


#: Those that the option `offset_commit.policy` names, made of `interval_s` and `records`. Those at
#: ends of transactions are so at most every `interval_s`, as all of them would be far too many.
BY_NAME: dict[str, Callable[[float, int], CommitPolicy]] = {
    "always": lambda _interval_s, _records: Always(),
    "periodic": lambda interval_s, _records: Periodic(interval_s),
    "count": lambda _interval_s, records: EveryRecords(records),
    "transaction": lambda interval_s, _records: AllOf(AtTransactionEnds(), Periodic(interval_s)),
}
