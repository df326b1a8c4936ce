"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC 2011).

The uniform of a token is a pure function of the request's seed, the sample's index, the position in
the output and the token's id, so that a draw is the same in every batch and on every device: the
key is the seed, and the counter is (token id // 4, output position, sample index, 0), whose four
output words serve four neighbouring token ids.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WORDS = 4
_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox(
    counter: tuple[NDArray[np.uint64], ...], key: NDArray[np.uint64]
) -> tuple[NDArray[np.uint64], ...]:
    """Four 32-bit words (held in uint64) for each counter of four 32-bit words and 64-bit key.

    The counter words and the key broadcast against each other.
    """
    c0, c1, c2, c3 = counter
    low, high = key & _LOW, key >> _SHIFT
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> _SHIFT) ^ c1 ^ low,
            second & _LOW,
            (first >> _SHIFT) ^ c3 ^ high,
            first & _LOW,
        )
        low = (low + np.uint64(_KEY_STEPS[0])) & _LOW
        high = (high + np.uint64(_KEY_STEPS[1])) & _LOW
    return c0, c1, c2, c3


def gumbel(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Gumbel noise of 32-bit words: -log(-log(u)) with u = (word + 1/2) / 2^32."""
    uniform = (words.astype(np.float64) + 0.5) * 2.0**-32
    noise: NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise
