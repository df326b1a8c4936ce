"""A picture of a run as SVG, which every browser shows: no package draws it.

Four panels: how TTFT, and TPOT beside ITL, are distributed; output tokens a second and requests
under way, over time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cupaged.benchmarks.load import LoadRun, RequestRecord
from cupaged.benchmarks.metrics import latencies_ms
from cupaged.benchmarks.report import ResultError
from cupaged.errors import ConfigError

__all__ = ["check_plot_path", "draw", "nice_ticks"]

_WIDTH, _HEIGHT = 960, 640
_PANEL_WIDTH, _PANEL_HEIGHT = 380, 200
_LEFT, _TOP, _ACROSS, _DOWN = 70, 90, 470, 290  # of the first panel; from one to the next
_COLOURS = ("#1f6feb", "#d9730d")
_MOST_POINTS = 400
_MOST_BINS, _BIN_S = 100, 0.1  # of the token rate: no narrower than that


class _Line(NamedTuple):
    """A curve: its name in the legend, ascending x, and y."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


class _Panel(NamedTuple):
    title: str
    x_label: str
    lines: Sequence[_Line]


def check_plot_path(path: str) -> None:
    """Refuse a name that is not one of a picture that can be drawn."""
    if not path.lower().endswith(".svg"):
        raise ConfigError("--plot", path, "a name that ends in .svg")


def draw(path: str, run: LoadRun, title: str, subtitle: str) -> None:
    """Write the picture of a run.

    Raises:
        ResultError: the file cannot be written.
    """
    done = [record for record in run.records if not record.error_code]
    panels = (
        _Panel(
            "Share of requests by time to first token",
            "ms",
            [_distribution("", latencies_ms("ttft", done))],
        ),
        _Panel(
            "Shares by time per token, and between messages",
            "ms",
            [_distribution(n.upper(), latencies_ms(n, done)) for n in ("tpot", "itl")],
        ),
        _Panel("Output tokens a second", "s", [_token_rate(run, done)]),
        _Panel("Requests under way", "s", [_under_way(run)]),
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        _text(_LEFT, 32, title, size=18, weight=600),
        _text(_LEFT, 52, subtitle, colour="#555"),
    ]
    for i, panel in enumerate(panels):
        parts += _drawn(panel, _LEFT + i % 2 * _ACROSS, _TOP + i // 2 * _DOWN)
    try:
        Path(path).write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")
    except OSError as error:
        raise ResultError(f"{path}: cannot be written: {error.strerror}") from None


def nice_ticks(most: float) -> list[float]:
    """From 0 to at least `most` in three to six equal steps of 1, 2, 2.5 or 5 times ten^k."""
    if not 0 < most < math.inf:
        most = 1.0
    power = 10.0 ** math.floor(math.log10(most / 5))
    step = next(f * power for f in (1, 2, 2.5, 5, 10, 20) if f * power * 5 >= most * (1 - 1e-9))
    return [i * step for i in range(math.ceil(most / step - 1e-9) + 1)]


def _distribution(name: str, values: Sequence[float]) -> _Line:
    """Which share of the values is at most x."""
    ordered = np.sort(np.asarray(values, float))
    if not len(ordered):
        return _Line(name, [], [])
    shares = np.arange(1, len(ordered) + 1) / len(ordered)
    chosen = np.unique(np.linspace(0, len(ordered) - 1, _MOST_POINTS).astype(int))
    first = float(ordered[0])
    return _Line(name, [first, *ordered[chosen].tolist()], [0.0, *shares[chosen].tolist()])


def _token_rate(run: LoadRun, done: Sequence[RequestRecord]) -> _Line:
    times = np.array([time for record in done for time in record.message_times_s])
    tokens = np.array([count for record in done for count in record.message_tokens])
    if not len(times):
        return _Line("", [], [])
    bins = min(_MOST_BINS, max(1, round(run.duration_s / _BIN_S)))
    sums, edges = np.histogram(times, bins, (0.0, run.duration_s), weights=tokens)
    rates = sums / (edges[1] - edges[0])
    return _Line("", ((edges[1:] + edges[:-1]) / 2).tolist(), rates.tolist())


def _under_way(run: LoadRun) -> _Line:
    moments = np.linspace(0.0, run.duration_s, _MOST_POINTS)
    begun = np.searchsorted(np.sort([r.sent_s for r in run.records]), moments, "right")
    ended = np.searchsorted(np.sort([r.end_s for r in run.records]), moments, "right")
    return _Line("", moments.tolist(), (begun - ended).tolist())


def _drawn(panel: _Panel, left: float, top: float) -> list[str]:
    lines = [line for line in panel.lines if len(line.x)]
    x_ticks = nice_ticks(max((max(line.x) for line in lines), default=1.0))
    y_ticks = nice_ticks(max((max(line.y) for line in lines), default=1.0))
    bottom = top + _PANEL_HEIGHT

    def place(x: float, y: float) -> tuple[float, float]:
        right = x / x_ticks[-1] * _PANEL_WIDTH
        return left + right, bottom - y / y_ticks[-1] * _PANEL_HEIGHT

    parts = [_text(left, top - 12, panel.title, size=13, weight=600)]
    for tick in y_ticks:
        y = place(0, tick)[1]
        parts.append(
            f'<path d="M{left:g} {y:.1f}h{_PANEL_WIDTH}" stroke="#e5e5e5" stroke-width="1"/>'
        )
        parts.append(_text(left - 8, y + 4, f"{tick:,.6g}", anchor="end", colour="#555"))
    for tick in x_ticks:
        x = place(tick, 0)[0]
        parts.append(_text(x, bottom + 18, f"{tick:,.6g}", anchor="middle", colour="#555"))
    parts.append(
        _text(left + _PANEL_WIDTH, bottom + 36, panel.x_label, anchor="end", colour="#555")
    )
    parts.append(f'<path d="M{left:g} {bottom:g}h{_PANEL_WIDTH}" stroke="#555" stroke-width="1"/>')
    for line, colour in zip(lines, _COLOURS, strict=False):
        points = " ".join(
            "{:.1f},{:.1f}".format(*place(x, y)) for x, y in zip(line.x, line.y, strict=True)
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
        )
    named = [(line.name, colour) for line, colour in zip(lines, _COLOURS, strict=False)]
    for i, (name, colour) in enumerate(named):
        if name:
            x = left + _PANEL_WIDTH - 8
            parts.append(_text(x, bottom - 30 + 18 * i, name, anchor="end", colour=colour))
    if not lines:
        parts.append(
            _text(left + _PANEL_WIDTH / 2, top + 100, "nothing", anchor="middle", colour="#555")
        )
    return parts


def _text(
    x: float, y: float, text: str, *,
    size: int = 12, weight: int = 400, anchor: str = "start", colour: str = "#111",
) -> str:  # fmt: skip
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
    )
