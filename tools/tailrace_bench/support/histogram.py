"""Draws latencies as SVG: a curve of counts for each series, over milliseconds on a logarithmic scale."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path

import numpy as np

_WIDTH, _HEIGHT, _LEFT, _TOP = 760, 320, 50, 40
_FROM_MS, _TO_MS, _BINS = 0.5, 2000.0, 72
_TICKS_MS = (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
_COLOURS = ("#0b6bcb", "#c2571a", "#5f6b7a")


def draw(path: Path, title: str, measured: Mapping[str, np.ndarray]) -> None:
    """Write the histogram as SVG.

    :param measured: milliseconds, by the name of each series.
    """
    edges = np.geomspace(_FROM_MS, _TO_MS, _BINS + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    bottom = _HEIGHT - 40
    for tick in _TICKS_MS:
        x = _x(tick)
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#dddddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 6}" text-anchor="middle">ms from the commit</text>')
    shares = {
        name: np.histogram(np.clip(found, _FROM_MS, _TO_MS), edges)[0] / len(found)
        for name, found in measured.items()
    }
    highest = max(float(share.max()) for share in shares.values())
    for number, (name, share) in enumerate(shares.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(
            f"{_x(float(np.sqrt(low * high))):.1f},{bottom - (bottom - _TOP) * value / highest:.1f}"
            for low, high, value in zip(edges[:-1], edges[1:], share, strict=True)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        words = f"{name}: median {np.median(measured[name]):.1f} ms"
        parts.append(
            f'<text x="{_WIDTH - 20}" y="{_TOP + 16 * (number + 1)}" text-anchor="end" '
            f'fill="{colour}">{escape(words)}</text>'
        )
    path.write_text("\n".join([*parts, "</svg>", ""]))


def _x(milliseconds: float) -> float:
    share = np.log(milliseconds / _FROM_MS) / np.log(_TO_MS / _FROM_MS)
    return float(_LEFT + (_WIDTH - _LEFT - 30) * share)
