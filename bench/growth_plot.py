"""The picture of `engine.py`: how output tokens a second grow with the number of requests."""

from __future__ import annotations

from pathlib import Path

from bench import svg
from cupaged.benchmarks.plot import nice_ticks

_LEFT, _TOP, _WIDTH, _STEP, _HEIGHT = 120, 80, 460, 34, 22


def draw(path: Path, rates: dict[str, float]) -> None:
    """One bar a number of requests, with the rate and how many times the first it is."""
    most = nice_ticks(max(rates.values()))[-1]
    first = next(iter(rates.values()))
    parts = [
        svg.text(20, 32, "Output tokens a second by requests at once", size=18, weight=600),
        svg.text(20, 54, "SmolLM2-135M-Instruct on the cpu device, weights as in the file"),
    ]
    for i, (requests, rate) in enumerate(rates.items()):
        y, wide = _TOP + i * _STEP, rate / most * _WIDTH
        unit = "request" if requests == "1" else "requests"
        parts.append(svg.text(_LEFT - 8, y + 15, f"{requests} {unit}", "end"))
        parts.append(
            f'<rect x="{_LEFT}" y="{y}" width="{wide:.1f}" height="{_HEIGHT}" fill="#1f6feb"/>'
        )
        parts.append(svg.text(_LEFT + wide + 6, y + 15, f"{rate:g} ({rate / first:.1f}x)"))
    bottom = _TOP + len(rates) * _STEP
    parts.append(f'<path d="M{_LEFT} {_TOP - 8}V{bottom}" stroke="#555"/>')
    svg.write(path, bottom + 20, parts)
