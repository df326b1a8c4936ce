"""The pictures of `memory.py`, as SVG: what fills the pool, and hit rates by its size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from bench.svg import text, write
from cupaged.benchmarks.plot import nice_ticks

_PARTS = {
    "token": ("tokens", "#1f6feb"),
    "reserved": ("kept for tokens to come", "#8fb8f5"),
    "unused": ("set aside, never filled", "#d9730d"),
    "other": ("free, or lost to rounding", "#d5d5d5"),
}
_SYSTEMS = {
    "request_level": "Request-level",
    "orca_max": "Orca (Max)",
    "orca_pow2": "Orca (Pow2)",
    "orca_oracle": "Orca (Oracle)",
    "ours": "cupaged",
}
_CURVES = {
    "best_in_order": ("best, in order of arrival", "#999999", "5 4"),
    "radix longest-prefix": ("radix tree, longest prefix first", "#2da44e", ""),
    "radix": ("radix tree", "#d9730d", ""),
    "hash": ("hash table", "#1f6feb", "7 7"),  # it lies on that of the tree
}


def draw_utilisation(path: Path, results: dict[str, Any]) -> None:
    """Stacked bars, one a system: percent of the pool."""
    left, width, top, step, height = 150, 560, 96, 44, 28
    parts = [
        text(20, 32, "What fills the KV pool", size=18, weight=600),
        text(20, 52, "OPT-13B, 12 GiB of KV, ShareGPT, more requests than can be served"),
    ]
    x = 20.0
    for name, colour in _PARTS.values():
        parts.append(f'<rect x="{x:g}" y="66" width="12" height="12" fill="{colour}"/>')
        parts.append(text(x + 17, 76, name))
        x += 42 + 6.3 * len(name)
    for i, (system, label) in enumerate(_SYSTEMS.items()):
        y = top + i * step
        parts.append(text(left - 10, y + 19, label, anchor="end"))
        x = float(left)
        for part, (_, colour) in _PARTS.items():
            share = results["pool_parts"][system][part]
            wide = share / 100 * width
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{height}" fill="{colour}"/>'
            )
            if share >= 5:
                ink = "#fff" if part in ("token", "unused") else "#111"
                parts.append(text(x + wide / 2, y + 19, f"{share:.1f}", "middle", ink))
            x += wide
    bottom = top + len(_SYSTEMS) * step
    for tick in range(0, 101, 20):
        parts.append(text(left + tick / 100 * width, bottom + 8, f"{tick} %", "middle", "#555"))
    write(path, bottom + 24, parts)


def draw_hit_rates(path: Path, results: dict[str, Any]) -> None:
    """Curves over the pool's size, which has a logarithmic axis."""
    left, width, top, height = 70, 640, 90, 280
    found = results["hit_rate"]
    sizes, best = found["num_blocks"], found["best"]
    low, high = math.log(sizes[0]), math.log(sizes[-1])
    ticks = nice_ticks(best)
    bottom = top + height

    def place(size: float, rate: float) -> tuple[float, float]:
        across = (math.log(size) - low) / (high - low)
        return left + across * width, bottom - rate / ticks[-1] * height

    parts = [
        text(20, 32, "How much of the prompts is found in the cache", size=18, weight=600),
        text(20, 52, "Percent of Mooncake's conversation trace; 256 requests wait at any time"),
    ]
    for tick in ticks:
        y = place(sizes[0], tick)[1]
        parts.append(f'<path d="M{left} {y:.1f}h{width}" stroke="#e5e5e5"/>')
        parts.append(text(left - 8, y + 4, f"{tick:g} %", "end", "#555"))
    for size in sizes:
        parts.append(text(place(size, 0)[0], bottom + 18, f"{size:,}", "middle", "#555"))
    parts.append(text(left + width, bottom + 36, "blocks of 512 tokens in the pool", "end", "#555"))
    parts.append(f'<path d="M{left} {bottom}h{width}" stroke="#555"/>')
    y = place(sizes[0], best)[1]
    parts.append(f'<path d="M{left} {y:.1f}h{width}" stroke="#111" stroke-dasharray="2 3"/>')
    parts.append(text(left + 6, y - 6, f"unbounded pool: {best:.1f} %"))
    curves = [(found[key], *style) for key, style in _CURVES.items() if key in found]
    for i, (rates, name, colour, dashes) in enumerate(curves):
        points = " ".join(
            "{:.1f},{:.1f}".format(*place(*point)) for point in zip(sizes, rates, strict=True)
        )
        line = f'fill="none" stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dashes}"'
        parts.append(f'<polyline points="{points}" {line}/>')
        y = bottom - 16 - 18 * (len(curves) - 1 - i)
        parts.append(f'<path d="M{left + width - 240} {y - 4}h26" {line}/>')
        parts.append(text(left + width - 208, y, name))
    write(path, bottom + 52, parts)
