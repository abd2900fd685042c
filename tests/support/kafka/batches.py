"""Records for tests of batches."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from tests.support.kafka.shares_rig import ORDERS
from tests.support.spark.wire import HandmadeLog, insert


def not_shrinking(random_: random.Random, length: int) -> str:
    points = np.frombuffer(random_.randbytes(4 * (length // 3)), "<u4") % (0x2FFF - 0x21) + 0x21
    return points.astype("<u4").tobytes().decode("utf-32-le")


def fill(log: HandmadeLog, rows: int, length: int, text: Callable[[random.Random, int], str]) -> int:
    """Write one transaction; its rows have keys from 0 on."""
    random_ = random.Random(7)
    return log.commit(ORDERS, *(insert(1, row, text(random_, length)) for row in range(rows)))
