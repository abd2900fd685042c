"""Parsing of numbers in PostgreSQL's ids and sequences, compared with regular expressions."""

from __future__ import annotations

import random
import re

import pyarrow as pa
import pytest

from tailrace.join.merge import UNKNOWN
from tailrace.join.postgres_ids import sequences, transaction_ids

_ID = re.compile(r"([0-9]+):([0-9]{1,19})\Z")
_SEQUENCE = re.compile(r'\["([0-9]{1,19})","([0-9]{1,19})"')
_MAX = 2**63 - 1


def _split(text: str | None) -> tuple[str | None, int]:
    found = _ID.match(text or "")
    if found is None or int(found[2]) > _MAX:
        return text, UNKNOWN
    return found[1], int(found[2])


def _sequence(text: str | None) -> tuple[int, int]:
    found = _SEQUENCE.match(text or "")
    numbers = (int(found[1]), int(found[2])) if found is not None else (UNKNOWN, UNKNOWN)
    return numbers if max(numbers) <= _MAX else (UNKNOWN, UNKNOWN)


IDS = [
    None, "", ":", "7", "7:", ":7", "7:8", "7:8:9", "7:8 ", " 7:8", "007:008", "a:8", "7:-8", "7:8\n",
    "\u0667:\u0668", f"7:{_MAX}", f"7:{_MAX + 1}", f"7:{2**64}", "7:" + "9" * 30, "9" * 30 + ":7",
    "7:" + "0" * 18 + "7", "7:" + "0" * 30 + "7", "3E11FA47-71CA-11E1-9E33-C80AA9429562:23",
]  # fmt: skip
SEQUENCES = [
    None, "", "[", '["', '["7"', '["7","', '["7","8', '["7","8"', '["7","8"]', '["7","8","9"]', '[null,"8"]',
    '["7", "8"]', '["","8"]', '["7",""]', f'["{_MAX}","8"]', f'["{_MAX + 1}","8"]', f'["7","{2**64}"]',
]  # fmt: skip


def _mixed(samples: list[str | None], letters: str, seed: int) -> list[str | None]:
    chance = random.Random(seed)
    made = ["".join(chance.choices(letters, k=chance.randrange(12))) for _ in range(5000)]
    return [*samples, *made]


@pytest.mark.parametrize("skipped", [0, 3])
def test_ids_are_split_as_by_a_regular_expression(skipped: int, join_seed: int) -> None:
    texts = _mixed(IDS, "1290:a", join_seed)
    found = transaction_ids(pa.array(texts, pa.string())[skipped:])
    found.keys.validate(full=True)
    assert list(zip(found.keys.to_pylist(), found.positions.tolist(), strict=True)) == [
        _split(text) for text in texts[skipped:]
    ]


@pytest.mark.parametrize("skipped", [0, 3])
def test_sequences_are_split_as_by_a_regular_expression(skipped: int, join_seed: int) -> None:
    texts = [*_mixed(SEQUENCES, '[",12]', join_seed), '["12","34"]']
    commits, rows = sequences(pa.array(texts, pa.string())[skipped:])
    assert list(zip(commits.tolist(), rows.tolist(), strict=True)) == [
        _sequence(text) for text in texts[skipped:]
    ]


def test_no_ids_give_no_numbers() -> None:
    found = transaction_ids(pa.array([], pa.string()))
    assert (len(found.keys), len(found.positions), len(sequences(pa.array([], pa.string()))[0])) == (0, 0, 0)
