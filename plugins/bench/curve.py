"""Two curves over a size, both axes logarithmic, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import msgspec

_WIDTH, _HEIGHT, _LEFT, _TOP = 420, 260, 70, 40
_STYLE = 'style="font-family:sans-serif;font-size:11px;fill:#333"'


class Point(msgspec.Struct, frozen=True):
    """A size, and the seconds of both sides."""

    size: int
    ours: float
    theirs: float


def draw(points: Sequence[Point], title: str) -> str:
    """The picture: blue weightlink, red the reference."""
    values = [v for p in points for v in (p.ours, p.theirs)]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    first, last = math.log(points[0].size), math.log(points[-1].size)

    def x(size: int) -> float:
        return _LEFT + _WIDTH * ((math.log(size) - first) / ((last - first) or 1.0))

    def y(seconds: float) -> float:
        return _TOP + _HEIGHT * (1 - (math.log10(seconds) - low) / ((high - low) or 1))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + 2 * _LEFT}" height="{_HEIGHT + 2 * _TOP + 20}">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="20" {_STYLE}>{escape(title)}</text>',
    ]
    for power in range(low, high + 1):
        at = y(10.0**power)
        parts.append(f'<line x1="{_LEFT}" y1="{at:.1f}" x2="{_LEFT + _WIDTH}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end" {_STYLE}>1e{power} s</text>')
    for point in points:
        parts.append(
            f'<text x="{x(point.size):.1f}" y="{_TOP + _HEIGHT + 16}" text-anchor="middle" {_STYLE}>{point.size}</text>'
        )
    for name, colour, of in (
        ("weightlink", "#1f4ea0", [p.ours for p in points]),
        ("awex", "#aa2828", [p.theirs for p in points]),
    ):
        path = " ".join(f"{x(p.size):.1f},{y(v):.1f}" for p, v in zip(points, of, strict=True))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{_LEFT + _WIDTH + 6}" y="{y(of[-1]) + 4:.1f}" {_STYLE}>{name}</text>')
    parts.append(f'<text x="{_LEFT + _WIDTH}" y="{_TOP + _HEIGHT + 32}" text-anchor="end" {_STYLE}>tensors</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
