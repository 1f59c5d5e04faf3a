"""A plan as a picture: how much goes from which trainer rank to which engine rank, and when every rank is busy. SVG,
written by hand, so that nothing has to be installed for it."""

from __future__ import annotations

from html import escape

import numpy as np
from weightlink.plugins.simulate.clock import Timeline

_CELLS = 64
_BINS = 160
_MARGIN = 60
_STYLE = "font-family:sans-serif;font-size:11px;fill:#333"

Matrix = np.ndarray[tuple[int, int], np.dtype[np.float64]]


def draw(timeline: Timeline, title: str) -> str:
    """The picture as SVG text. More than 64 ranks of a side are drawn in equal groups."""
    traffic, rows, columns = traffic_of(timeline)
    busy, who = busy_of(timeline)
    cell = max(6, min(18, 384 // max(1, rows, columns)))
    width = max(columns * cell, _BINS * 4) + 2 * _MARGIN
    below = 70 + rows * cell + 60
    height = below + len(busy) * cell + 50
    text = f'style="{_STYLE}"'
    engines, darkest = timeline.ranks - timeline.trainers, traffic.max(initial=0.0) / 1e9
    senders = f"{timeline.trainers} trainer ranks"
    if senders_of(timeline) > timeline.trainers:
        senders += f" and {engines} engine ranks that relay"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_MARGIN}" y="24" style="{_STYLE};font-size:14px">{escape(title)}</text>',
        f'<text x="{_MARGIN}" y="52" {text}>bytes from {senders} (down) to {engines} engine'
        f" ranks (across); darkest: {darkest:.3g} GB</text>",
        *_cells(traffic, _MARGIN, 60, cell, cell),
        f'<text x="{_MARGIN}" y="{below - 12}" style="{_STYLE}">links in use over {timeline.seconds:.3g} s;'
        " blue: trainer ranks send, red: engine ranks receive; darkest: at full speed</text>",
        *_cells(busy, _MARGIN, below, 4, cell, [(31, 78, 160) if trainer else (170, 40, 40) for trainer in who]),
        f'<text x="{_MARGIN}" y="{below + len(busy) * cell + 16}" style="{_STYLE}">0 s</text>',
        f'<text x="{_MARGIN + _BINS * 4}" y="{below + len(busy) * cell + 16}" text-anchor="end"'
        f' style="{_STYLE}">{timeline.seconds:.3g} s</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def traffic_of(timeline: Timeline) -> tuple[Matrix, int, int]:
    """Bytes from each group of ranks that send to each of engine ranks: trainer ranks, and where engines relay, engine
    ranks below them."""
    engines, senders = timeline.ranks - timeline.trainers, senders_of(timeline)
    down, across = -(-senders // _CELLS), -(-engines // _CELLS)
    rows, columns = -(-senders // down), -(-engines // across)
    found = np.zeros((rows, columns))
    np.add.at(found, (timeline.src // down, (timeline.dst - timeline.trainers) // across), timeline.nbytes)
    return found, rows, columns


def senders_of(timeline: Timeline) -> int:
    """Ranks that send: the trainer's, or all if engines relay."""
    return timeline.ranks if int(timeline.src.max(initial=0)) >= timeline.trainers else timeline.trainers


def busy_of(timeline: Timeline) -> tuple[Matrix, list[bool]]:
    """The share of the busiest that each group of ranks moves in each slice of time; True where it is of trainers."""
    slices = np.zeros((timeline.ranks, _BINS))
    if timeline.seconds:
        at = timeline.start / timeline.seconds * _BINS
        until = np.maximum(timeline.end / timeline.seconds * _BINS, at + 1e-9)
        rate = timeline.nbytes / (until - at)
        first, last = at.astype(np.int64), np.minimum(until.astype(np.int64), _BINS - 1)
        for offset in range(int((last - first).max(initial=0)) + 1):
            here = first + offset <= last
            number = first[here] + offset
            overlap = np.clip(np.minimum(until[here], number + 1) - np.maximum(at[here], number), 0, None)
            moved = rate[here] * overlap
            np.add.at(slices, (timeline.dst[here], number), moved)
            by_trainer = timeline.src[here] < timeline.trainers
            np.add.at(slices, (timeline.src[here][by_trainer], number[by_trainer]), moved[by_trainer])
    kept, who = [], []
    for start, stop, trainer in ((0, timeline.trainers, True), (timeline.trainers, timeline.ranks, False)):
        group = -(-(stop - start) // _CELLS) or 1
        for rank in range(start, stop, group):
            kept.append(slices[rank : min(rank + group, stop)].mean(axis=0))
            who.append(trainer)
    return np.array(kept).reshape(-1, _BINS), who


def _cells(
    values: Matrix, x: int, y: int, width: int, height: int, colours: list[tuple[int, int, int]] | None = None
) -> list[str]:
    top = values.max(initial=0.0)
    found = []
    for row, column in np.argwhere(values > 0).tolist():
        shade = 0.12 + 0.88 * float(values[row, column] / top)
        red, green, blue = (round(255 - (255 - part) * shade) for part in (colours[row] if colours else (31, 78, 160)))
        found.append(
            f'<rect x="{x + column * width}" y="{y + row * height}" width="{width}" height="{height}"'
            f' fill="#{red:02x}{green:02x}{blue:02x}"/>'
        )
    return found
