"""A number for each token of a sequence that stands for it and all tokens before it.

What the KV sanitizer compares. Not for naming blocks that others may ask for: it is no
cryptographic hash (`cupaged.engine.prefix_cache` has one).
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from cupaged.request import Request

__all__ = ["Digests", "Ids", "chain", "ranges", "salt"]

Digests = NDArray[np.uint64]
Ids = NDArray[np.int64]


def ranges(start: Ids, end: Ids) -> tuple[Ids, Ids]:
    """Numbers from start[i] up to end[i], for each i, and the i of each."""
    counts = end - start
    index = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    return index, np.arange(len(index)) + (start - first)[index]


def chain(tokens: Digests, positions: Ids, before: Digests, first: Ids, counts: Ids) -> Digests:
    """Digest of each token and all before it.

    Sequence i has counts[i] tokens from first[i] on, and before[i] is the digest of what precedes
    them. The sum of one hash a token and position, modulo 2^64.
    """
    hashes = _mix(tokens ^ (positions.astype(np.uint64) << np.uint64(32)))
    sums = np.cumsum(hashes, dtype=np.uint64)
    base = before - (sums[first] - hashes[first])
    chained: Digests = sums + np.repeat(base, counts)
    return chained


def _mix(values: Digests) -> Digests:
    """A 64-bit finaliser (SplitMix64; Steele, Lea and Flood, OOPSLA 2014)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def salt(request: Request) -> int:
    """What precedes the first token: equal for requests that may share blocks."""
    if request.uses_prefix_cache and not request.cache_extras:
        return 0
    kind = request.cache_extras if request.uses_prefix_cache else request.arrival
    return int.from_bytes(blake2b(repr(kind).encode(), digest_size=8).digest(), "little")
