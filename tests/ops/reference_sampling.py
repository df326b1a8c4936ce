"""The tokens that limits keep, by sorting a whole row, with the mass as integers of Python.

It imports no sampling code of the package under test. Sums of the fixed-point masses are exact, so
that this says which tokens are kept even where a sum meets its limit to the last bit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def scaled_logits(logits: NDArray[np.float32], temperature: float) -> NDArray[np.float32]:
    """(logit - highest) / temperature, each step rounded to float32."""
    with np.errstate(over="ignore"):
        scaled: NDArray[np.float32] = (logits - logits.max()) / np.float32(temperature)
    return scaled


def kept_by_sorting(
    logits: NDArray[np.float32], temperature: float, top_k: int, top_p: float, min_p: float
) -> list[int]:
    """Ids, likeliest first, equal ones by id. top_p and min_p are rounded to float32."""
    scaled = scaled_logits(logits, temperature)
    order = np.lexsort((np.arange(len(scaled)), -scaled))
    if not 0 < top_k < len(scaled) and top_p == 1 and min_p == 0:
        return [int(token) for token in order]  # a row without limits is drawn from as it is
    weights = np.exp(scaled[order].astype(np.float64))
    order = order[weights >= np.float32(min_p)]
    if 0 < top_k < len(scaled):
        order = order[:top_k]
    masses = [int(mass) for mass in np.rint(weights[: len(order)] * 2.0**40)]
    limit = float(np.float32(top_p)) * float(sum(masses))
    kept, before = 1, masses[0]
    while kept < len(order) and float(before) < limit:
        before += masses[kept]
        kept += 1
    return [int(token) for token in order[:kept]]


def tokens_up_to(end: int, logits: NDArray[np.float32], temperature: float) -> list[int]:
    """The tokens at or before a place as `sampling.cu` states it, likeliest first."""
    distance = np.abs(scaled_logits(logits, temperature))
    bits = (len(logits) - 1).bit_length()
    ids = np.arange(len(logits), dtype=np.uint64)
    places = (distance.view(np.uint32).astype(np.uint64) << np.uint64(bits)) | ids
    order = np.argsort(places)
    return [int(token) for token in order[places[order] <= np.uint64(end)]]
