"""y = x W^T + b in float64, one output after another, and the layout of a packed weight.

Nothing is shared with the kernels or their launch code: no chunks, no tiles.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def linear(
    x: NDArray[Any], weight: NDArray[Any], bias: NDArray[Any] | None = None
) -> tuple[F64, F64]:
    """Outputs [num_tokens, out_features], and for each the sum of its terms' absolute values."""
    num_tokens, out_features = len(x), len(weight)
    out = np.zeros((num_tokens, out_features))
    bound = np.zeros((num_tokens, out_features))
    x64, weight64 = x.astype(np.float64), weight.astype(np.float64)
    for token in range(num_tokens):
        for feature in range(out_features):
            terms = x64[token] * weight64[feature]
            added = 0.0 if bias is None else float(bias[feature])
            out[token, feature] = terms.sum() + added
            bound[token, feature] = np.abs(terms).sum() + abs(added)
    return out, bound


def packed(weight: NDArray[Any]) -> NDArray[Any]:
    """A weight [out_features, in_features] as `cuda/packed_weight.cuh` states it."""
    rows = (len(weight) + 15) // 16 * 16
    columns = (weight.shape[1] + 63) // 64 * 64
    padded = np.zeros((rows, columns), weight.dtype)
    padded[: len(weight), : weight.shape[1]] = weight
    if weight.dtype.itemsize == 4:
        return padded
    order = []
    for first_row in range(0, rows, 16):
        for first_column in range(0, columns, 32):
            for product in (0, 1):
                for lane in range(32):
                    row = first_row + lane // 4
                    column = first_column + lane % 4 * 8 + product * 4
                    for offset in (0, 2):
                        order += [(row, column + offset), (row, column + offset + 1)]
                        order += [(row + 8, column + offset), (row + 8, column + offset + 1)]
    return np.array([padded[place] for place in order], weight.dtype).reshape(rows, columns)
