"""Medians, ranges and ratios of what was measured, as the results say them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from bench.peers.contestants import OURS, WEIGHTS, Contestant
from bench.peers.measurement import CONCURRENT, Sample

RATE = "output_tokens_per_s"
LESS_IS_BETTER = frozenset({"wall_s", "peak_rss_mb", "import_s", "load_s"})
Samples = Mapping[Contestant, Sequence[Sample]]


class Loss(NamedTuple):
    """A peer with the same weights does better: by which factor."""

    weights: str
    part: str
    metric: str
    peer: str
    factor: float


def figures(samples: Sequence[Sample]) -> dict[str, Any]:
    """Median, least and most of every metric, in the order of the parts."""
    return {
        part: {metric: _spread(samples, part, metric) for metric in samples[0][part]}
        for part in samples[0]
    }


def best_peer(samples: Samples, concurrent: int) -> Contestant | None:
    """Whose median rate is the highest, whatever its weights; None where no peer ran."""
    peers = [contestant for contestant in samples if contestant.engine != OURS]
    return max(peers, key=lambda c: _median(samples[c], str(concurrent), RATE), default=None)


def ratio(ours: Sequence[Sample], theirs: Sequence[Sample], concurrent: int) -> float:
    """Median of the ratios of rates, round by round."""
    part = str(concurrent)
    pairs = zip(ours, theirs, strict=True)
    return round(median(a[part][RATE] / b[part][RATE] for a, b in pairs), 3)


def against_the_best(samples: Samples) -> tuple[dict[str, str], dict[str, dict[str, float]]]:
    """The best peer by number of sequences, and the ratios to it by our weights."""
    best: dict[str, str] = {}
    ratios: dict[str, dict[str, float]] = {}
    for concurrent in CONCURRENT:
        if (peer := best_peer(samples, concurrent)) is None:
            continue
        best[str(concurrent)] = peer.name
        for weights in WEIGHTS:
            if ours := samples.get(Contestant(OURS, weights)):
                ratios.setdefault(weights, {})[str(concurrent)] = ratio(
                    ours, samples[peer], concurrent
                )
    return best, ratios


def losses(samples: Samples) -> list[Loss]:
    """Every metric in which some peer with the same weights has the better median: the best one."""
    found = []
    for weights in WEIGHTS:
        ours = samples.get(Contestant(OURS, weights))
        peers = [c for c in samples if c.engine != OURS and c.weights == weights]
        if not ours or not peers:
            continue
        for part, metric in ((p, m) for p, metrics in ours[0].items() for m in metrics):
            if metric == "wall_s":
                continue  # the rate says it
            sign = -1 if metric in LESS_IS_BETTER else 1
            values = {c: _median(samples[c], part, metric) for c in peers}
            peer = max(peers, key=lambda c: sign * values[c])
            own = _median(ours, part, metric)
            factor = (values[peer] / own) ** sign
            if factor > 1:
                found.append(Loss(weights, part, metric, peer.name, round(factor, 2)))
    return found


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> dict[str, int]:
    """How many outputs are equal to the last token, of those that both computed."""
    pairs = list(zip(ours, theirs, strict=False))
    return {"equal": sum(list(a) == list(b) for a, b in pairs), "of": len(pairs)}


def _median(samples: Sequence[Sample], part: str, metric: str) -> float:
    return median(sample[part][metric] for sample in samples)


def _spread(samples: Sequence[Sample], part: str, metric: str) -> dict[str, float]:
    values = [sample[part][metric] for sample in samples]
    return {
        "median": round(median(values), 2),
        "min": round(min(values), 2),
        "max": round(max(values), 2),
    }
