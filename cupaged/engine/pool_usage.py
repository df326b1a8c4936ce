"""How well the blocks of a pool are used."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.signedinteger[Any]]


def utilisation(
    table: NDArray[np.int32], num_held: Ints, num_tokens: Ints, block_size: int, num_blocks: int
) -> float:
    """Share of the slots in used blocks that hold a token; 1.0 when no block is used.

    A block that several sequences hold counts once, with the tokens of who has most in it.

    Args:
        table: int32 [num_rows, max_blocks_per_seq], the blocks of a sequence in each row.
        num_held: [num_rows], how many those are.
        num_tokens: [num_rows], tokens of each sequence that are in its blocks.
    """
    row = np.repeat(np.arange(len(num_held)), num_held)
    if not len(row):
        return 1.0
    column = np.arange(len(row)) - (np.cumsum(num_held) - num_held)[row]
    tokens = np.clip(num_tokens[row] - column * block_size, 0, block_size)
    filled = np.full(num_blocks, -1)
    np.maximum.at(filled, table[row, column], tokens)
    return float(np.mean(filled[filled >= 0])) / block_size
