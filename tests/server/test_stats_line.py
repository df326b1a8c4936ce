"""The line of every ten seconds: its form, its numbers, and its silence."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cupaged.outputs import EngineStats
from cupaged.server.stats_line import StatsLine

IDLE = EngineStats(
    num_running=0,
    num_waiting=0,
    num_preempted=0,
    num_preemptions_total=0,
    num_blocks=200,
    num_used_blocks=0,
    num_shared_blocks=0,
    kv_utilisation=1.0,
    num_steps=0,
    prompt_tokens_total=0,
    generation_tokens_total=0,
)


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def tokens(prompt: int, generation: int, running: int = 1) -> EngineStats:
    return replace(
        IDLE, num_running=running, prompt_tokens_total=prompt, generation_tokens_total=generation
    )


def test_golden_line() -> None:
    clock = Clock()
    line = StatsLine(clock=clock)
    stats = replace(
        tokens(125, 1000, running=3), num_waiting=4, num_preempted=1, num_preemptions_total=2,
        num_used_blocks=25,
    )  # fmt: skip
    clock.now += 10
    assert line.observe(stats) == (
        "Avg prompt throughput: 12.5 tokens/s, Avg generation throughput: 100.0 tokens/s, "
        "Running: 3 reqs, Waiting: 5 reqs, KV cache usage: 12.5%, Preemptions: 2"
    )


def test_a_line_every_ten_seconds_over_those_seconds() -> None:
    clock = Clock()
    line = StatsLine(clock=clock)
    shown = []
    for second in range(1, 31):
        clock.now += 1
        text = line.observe(tokens(0, second * second))
        if text is not None:
            shown.append((second, text.split("generation throughput: ")[1].split(" ")[0]))
    assert shown == [(10, "10.0"), (20, "30.0"), (30, "50.0")]


def test_silent_when_idle() -> None:
    clock = Clock()
    line = StatsLine(clock=clock)
    for _ in range(100):
        clock.now += 1
        assert line.observe(IDLE) is None
    assert not line.is_due


def test_what_stands_still_with_work_is_told() -> None:
    clock = Clock()
    line = StatsLine(clock=clock)
    clock.now += 10
    text = line.observe(replace(IDLE, num_waiting=2))
    assert text is not None
    assert "Waiting: 2 reqs" in text


def test_the_last_work_is_told_and_then_nothing() -> None:
    clock = Clock()
    line = StatsLine(clock=clock)
    clock.now += 3
    assert line.observe(tokens(5, 50)) is None
    clock.now += 1
    assert line.observe(tokens(5, 60, running=0)) is None
    assert line.is_due
    clock.now += 6
    text = line.observe(tokens(5, 60, running=0))
    assert text is not None
    assert "generation throughput: 6.0 tokens/s, Running: 0 reqs" in text
    assert not line.is_due
    clock.now += 10
    assert line.observe(tokens(5, 60, running=0)) is None


def test_a_rest_does_not_thin_the_rate() -> None:
    """After an hour without snapshots, ten tokens a second are ten tokens a second."""
    clock = Clock()
    line = StatsLine(clock=clock)
    clock.now += 3600
    for second in range(1, 10):
        assert line.observe(tokens(0, 10 * second)) is None
        clock.now += 1
    text = line.observe(tokens(0, 100))
    assert text is not None
    assert "generation throughput: 10.0 tokens/s" in text
