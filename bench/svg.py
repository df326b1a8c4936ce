"""Pictures of results as SVG, which every browser shows: no package draws them."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

WIDTH = 760


def write(path: Path, height: float, parts: Iterable[str]) -> None:
    """Write a picture of `WIDTH` by height, on white."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
        f'width="{WIDTH}" height="{height:g}" font-family="system-ui, sans-serif" font-size="12">'
    )
    ground = f'<rect width="{WIDTH}" height="{height:g}" fill="#fff"/>'
    path.write_text("\n".join([head, ground, *parts, "</svg>"]) + "\n", encoding="utf-8")


def text(
    x: float, y: float, words: str, anchor: str = "start", colour: str = "#111",
    *, size: int = 12, weight: int = 400,
) -> str:  # fmt: skip
    """A line of text; `anchor` says which end of it is at x."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'
    )
