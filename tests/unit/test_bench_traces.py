"""Loads of the benchmarks: the drawing of arrivals, and the files they are drawn from."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np

from bench import traces
from bench.traces.make import make_blocks, make_lengths

PAIRS = np.array([[5, 6], [2000, 48], [7, 8], [1, 2046], [3, 4]], np.uint16)


def test_a_load_is_drawn_as_the_papers_was() -> None:
    """With the global generators, in the order in which its scripts use them."""
    random.seed(0)
    np.random.seed(0)
    counts = np.random.poisson(3.0 * 0.01, size=200)
    chosen = ([[5, 6], [7, 8], [1, 2046], [3, 4]] * 99)[: counts.sum()]  # one does not fit
    random.shuffle(chosen)
    arrivals = [i * 0.01 for i, count in enumerate(counts) for _ in range(count)]
    expected = [traces.TimedRequest(t, *pair) for t, pair in zip(arrivals, chosen, strict=True)]
    assert len(expected) > 4
    assert traces.poisson_load(PAIRS, rate=3.0, duration_s=2.0) == expected


def test_another_seed_is_another_load() -> None:
    loads = [traces.poisson_load(PAIRS, rate=9.0, duration_s=2.0, seed=seed) for seed in (0, 1)]
    assert loads[0] != loads[1]


def test_the_files_have_the_published_lengths() -> None:
    """First and mean lengths; the means of all of Alpaca are 19.31 and 58.45."""
    alpaca = traces.lengths("alpaca")
    assert np.abs(alpaca.mean(axis=0) - (19.31, 58.45)).max() < 0.2
    assert len(traces.lengths("sharegpt")) >= 3604  # requests of 900 s at 4 a second
    assert len(alpaca) >= 27147  # at 30 a second


def test_blocks_are_prefixes() -> None:
    """Equal ids have equal ids before them, which makes an id the name of a prefix."""
    requests = traces.prefix_blocks()
    assert len(requests) == 12031
    assert requests[0] == traces.BlockedRequest(6758, 500, tuple(range(14)))
    assert requests[1].block_ids == (0, *range(14, 28))
    before: dict[int, int] = {}
    for request in requests:
        assert len(request.block_ids) == -(-request.input_tokens // 512)
        for parent, block in zip((-1, *request.block_ids), request.block_ids, strict=False):
            assert before.setdefault(block, parent) == parent


def test_files_are_made(tmp_path: Path) -> None:
    source, target = tmp_path / "x.csv", tmp_path / "x.npz"
    source.write_text("input_tokens,output_tokens\n1,2\n70000,4\n5,6\n")
    make_lengths(source, target, 2)
    with np.load(target) as file:
        assert file["lengths"].tolist() == [[1, 2], [65535, 4]]
    rows = [
        {"timestamp": 0, "input_length": 513, "output_length": 9, "hash_ids": [0, 3]},
        {"timestamp": 1, "input_length": 512, "output_length": 8, "hash_ids": [1]},
    ]
    source.write_text("\n".join(map(json.dumps, rows)) + "\n")
    make_blocks(source, target)
    with np.load(target) as file:
        assert file["lengths"].tolist() == [[513, 9], [512, 8]]
        assert file["id_steps"].tolist() == [0, 3, -2]
