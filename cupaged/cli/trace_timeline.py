"""The timeline of a trace: a line a step with a bar of the KV pool, and what it all adds up to.

The bar has four parts in proportion to their blocks, not a cell for each block. It takes what the
figures leave of the terminal's width.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from cupaged.config import EngineConfig
from cupaged.engine.step_events import PoolCounts
from cupaged.engine.trace_file import TraceReader
from cupaged.engine.trace_state import StepFigures, TraceState

_HEAD = "  step   time s      ms  run wait    new   in  out  pre"
_MIN_BAR = 10
_RED, _YELLOW, _DIM, _PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Look:
    """How it is drawn. cells: of a shared, used, cached and free part; columns: of a line."""

    cells: tuple[str, str, str, str]
    columns: int
    has_colours: bool

    def coloured(self, text: str, colour: str) -> str:
        """The text in a colour, where there are any."""
        return f"{colour}{text}{_PLAIN}" if self.has_colours and text.strip() else text


def look_of_output() -> Look:
    """As standard output can show it."""
    encoding = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "")
    cells = ("▓", "█", "░", "·") if encoding == "utf8" else ("=", "#", "-", ".")
    wanted = "NO_COLOR" not in os.environ and os.environ.get("TERM", "dumb") != "dumb"
    return Look(cells, shutil.get_terminal_size().columns, wanted and sys.stdout.isatty())


def lines(
    trace: TraceReader, every: int = 1, first: int | None = None, last: int | None = None
) -> Iterator[str]:
    """A line for each `every` steps of [first, last], and a summary of them."""
    look, config = look_of_output(), trace.header.config
    state, summary = TraceState(config), Summary(config)
    shared, used, cached, free = look.cells
    yield f"KV pool: {used} used  {shared} shared  {cached} cached  {free} free"
    yield _HEAD + "  KV pool"
    group: list[StepFigures] = []
    for event in trace:
        figures = state.follow(event)
        summary.num_requests = state.num_requests
        if figures is None or not (first or 0) <= figures.step_id:
            continue
        if last is not None and figures.step_id > last:
            break
        summary.add(figures)
        group.append(figures)
        if len(group) == every:
            yield from _group_lines(group, config.num_blocks, look)
            group = []
    if group:
        yield from _group_lines(group, config.num_blocks, look)
    yield ""
    yield from summary.lines()


def bar(pool: PoolCounts, num_blocks: int, width: int, look: Look) -> str:
    """Shared, used, cached and free blocks in `width` cells; what there is has a cell."""
    held = pool.used + pool.quarantined
    ends = [-(-width * number // num_blocks) for number in (pool.shared, held, held + pool.cached)]
    ends = [min(end, width) for end in ends]
    counts = [end - begin for begin, end in zip([0, *ends], [*ends, width], strict=True)]
    colours = (_YELLOW, "", _DIM, _DIM)
    parts = zip(look.cells, counts, colours, strict=True)
    return "".join(
        look.coloured(cell * n, colour) if colour else cell * n for cell, n, colour in parts
    )


def _group_lines(group: list[StepFigures], num_blocks: int, look: Look) -> Iterator[str]:
    newest = group[-1]
    duration_ms = sum(f.total_us for f in group) / 1e3
    computed = sum(f.num_computed for f in group)
    text = (
        f"{group[0].step_id:>6} {group[0].began_us / 1e6:>8.3f} {_narrow(duration_ms):>7} "
        f"{newest.num_running:>4} {newest.num_waiting:>4} {computed:>6} "
        f"{_count(sum(f.num_admitted for f in group))} "
        f"{_count(sum(f.finished.total() for f in group))} "
    )
    preempted = _count(sum(f.num_preempted for f in group))
    text += look.coloured(preempted, _RED)
    pools = [f.pool for f in group if f.pool is not None]
    if pools:
        fullest = max(pools)
        width = max(_MIN_BAR, look.columns - len(_HEAD) - 8)
        share = f"{100 * fullest.used / num_blocks:.0f}%"
        text += f"  {bar(fullest, num_blocks, width, look)} {share:>4}"
    yield text
    for figures in group:
        for note in figures.notes:
            yield look.coloured(f"{'':>6} {note}", _RED)


def _count(number: int) -> str:
    """Four columns, empty for none."""
    return f"{number or '':>4}"


def _narrow(milliseconds: float) -> str:
    """At most seven columns."""
    return f"{milliseconds:.2f}" if milliseconds < 1000 else f"{milliseconds:.0f}"


class Summary:
    """What the steps that were shown add up to. num_requests: those that arrived, shown or not."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.num_requests = 0
        self._total = StepFigures(0, 0)
        self._num_steps = 0
        self._first_us = -1
        self._last_us = 0
        self._most_used = 0
        self._most_shared = 0
        self._shares: list[float] = []  # of the slots of used blocks

    def add(self, figures: StepFigures) -> None:
        """One more step."""
        total = self._total
        for name in (
            "total_us", "schedule_us", "submit_us", "collect_us", "num_computed", "num_drawn",
            "num_found", "num_admitted", "num_preempted", "num_copies", "num_handed_out",
            "num_shared", "num_swapped_out", "num_swapped_in",
        ):  # fmt: skip
            setattr(total, name, getattr(total, name) + getattr(figures, name))
        total.finished += Counter(figures.finished)
        self._num_steps += 1
        if self._first_us < 0:
            self._first_us = figures.began_us
        self._last_us = figures.began_us + figures.total_us
        if figures.pool is not None:
            self._most_used = max(self._most_used, figures.pool.used)
            self._most_shared = max(self._most_shared, figures.pool.shared)
            self._shares.append(figures.utilisation)

    def lines(self) -> Iterator[str]:
        """Four lines; one if there was no step."""
        total, num_blocks = self._total, self._config.num_blocks
        if not self._num_steps:
            yield "no step"
            return
        ends = ", ".join(f"{n} {reason}" for reason, n in sorted(total.finished.items()))
        seconds = (self._last_us - self._first_us) / 1e6
        yield (
            f"{self._num_steps} steps in {seconds:.3f} s; {self.num_requests} requests; "
            f"sequences that ended: {ends or 'none'}"
        )
        yield (
            f"tokens: {total.num_computed} computed, {total.num_drawn} drawn, {total.num_found} "
            f"found in the prefix cache; {total.num_preempted} preemptions"
        )
        yield (
            f"blocks: at most {self._most_used} of {num_blocks} used, {self._most_shared} shared; "
            f"{total.num_handed_out} handed out, {total.num_copies} copied"
            f"{self._swaps()}"
        )
        if self._shares:
            share = 100 * sum(self._shares) / len(self._shares)
            yield f"{share:.1f} % of the slots of used blocks held a token (mean of the steps)"
        yield self._times()

    def _swaps(self) -> str:
        """Nothing where the host has no blocks."""
        if not self._config.num_host_blocks:
            return ""
        total = self._total
        return f", {total.num_swapped_out} to the host and {total.num_swapped_in} back"

    def _times(self) -> str:
        total = self._total
        parts = {
            "schedule": total.schedule_us,
            "submit": total.submit_us,
            "collect": total.collect_us,
        }
        whole = max(total.total_us, 1)
        parts["other"] = max(0, whole - sum(parts.values()))
        shares = ", ".join(f"{name} {100 * part / whole:.1f} %" for name, part in parts.items())
        return f"a step took {whole / self._num_steps / 1e3:.3f} ms: {shares}"
