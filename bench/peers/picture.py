"""The results as bars: output tokens a second with 16 and 64 sequences, and of one stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench import svg
from bench.peers.contestants import OURS
from bench.peers.table import LABELS, notes, rows_of
from cupaged.benchmarks.plot import nice_ticks

_PANELS = (
    ("16 at once", "16", "output_tokens_per_s"),
    ("64 at once", "64", "output_tokens_per_s"),
    ("one stream", "single", "decode_tokens_per_s"),
)
_OUR_COLOUR, _PEER_COLOUR = "#1f6feb", "#c9c9c9"
_LEFT, _TOP, _ACROSS, _WIDTH, _STEP, _HEIGHT = 214, 104, 182, 125, 26, 18


def draw(path: Path, results: dict[str, Any]) -> None:
    """Three panels with one bar a contestant; a thin line is the range of the rounds."""
    machine = results["machine"]
    rows = list(rows_of(results))
    parts = [
        svg.text(20, 32, "Output tokens a second on a CPU", size=18, weight=600),
        svg.text(
            20, 52, f"SmolLM2-135M-Instruct, {machine['cores']} cores: {machine['processor']}"
        ),
    ]
    for i, (engine, variant, _) in enumerate(rows):
        label = f"{LABELS[engine]}, {variant}"
        parts.append(svg.text(_LEFT - 8, _TOP + i * _STEP + 13, label, "end"))
    bottom = _TOP + len(rows) * _STEP
    for i, (title, part, metric) in enumerate(_PANELS):
        left = _LEFT + i * _ACROSS
        spreads = [(engine, found[part][metric]) for engine, _, found in rows]
        most = nice_ticks(max(spread["max"] for _, spread in spreads))[-1]
        parts.append(svg.text(left, _TOP - 14, title, weight=600))
        for row, (engine, spread) in enumerate(spreads):
            y = _TOP + row * _STEP
            wide, low, high = (
                spread[key] / most * _WIDTH for key in ("median", "min", "max")
            )  # fmt: skip
            colour = _OUR_COLOUR if engine == OURS else _PEER_COLOUR
            parts.append(
                f'<rect x="{left}" y="{y}" width="{wide:.1f}" height="{_HEIGHT}" fill="{colour}"/>'
            )
            middle = y + _HEIGHT / 2
            parts.append(f'<path d="M{left + low:.1f} {middle:g}h{high - low:.1f}" stroke="#111"/>')
            parts.append(svg.text(left + high + 4, y + 13, f"{spread['median']:.1f}"))
        parts.append(f'<path d="M{left} {_TOP - 6}V{bottom}" stroke="#555"/>')
    for note in notes(results):
        bottom += 20
        parts.append(svg.text(20, bottom, note, colour="#555"))
    svg.write(path, bottom + 16, parts)
