"""Sampling with NumPy: edits, greedy, temperature, min-p, top-k and top-p, for all rows at once.

A draw is the arg max of logit / temperature + Gumbel noise over the tokens that are kept, with
noise from `philox`. What is kept is exact: probability mass is summed in 64-bit fixed point, so
that no order of summation changes it, and equal logits are ranked by token id, lower first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cupaged.engine.sampling_batch import LogitsEdits, SamplingBatch
from cupaged.ops.philox import WORDS, gumbel, philox

_MASS_UNIT = float(2**40)  # fixed-point mass of the likeliest token; 2^18 tokens stay below 2^63

_ELEMENTS_AT_ONCE = 1 << 18  # logits worked on at once: some 15 MiB of temporaries

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]


def sample(logits: FloatArray, sampling: SamplingBatch) -> NDArray[np.int32]:
    """One token a sample, int32 [num_samples]; -1 where the logits are not numbers, else the forced
    token if there is one.

    logits: float32 [num_logits, vocab_size]; edited in place.
    """
    if sampling.edits is not None:
        _edit(logits, sampling.edits)
    best = np.argmax(logits, axis=1)
    highest = logits[np.arange(len(logits)), best]
    tokens = np.where(np.isfinite(highest), best, -1)[sampling.logits_row].astype(np.int32)
    vocab_size = logits.shape[1]
    top_k = np.where(sampling.top_k < vocab_size, sampling.top_k, 0)
    drawn = (sampling.temperature > 0) & (tokens >= 0)
    limited = (top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
    rows_at_once = max(1, _ELEMENTS_AT_ONCE // vocab_size)
    for rows, choose in (
        (np.flatnonzero(drawn & limited), _draw_limited),
        (np.flatnonzero(drawn & ~limited), _draw_from_all),
    ):
        for first in range(0, len(rows), rows_at_once):
            part = rows[first : first + rows_at_once]
            source = sampling.logits_row[part]
            with np.errstate(over="ignore"):  # -inf, a token that is never drawn, is right
                scaled = logits[source] - highest[source, None]
                scaled /= sampling.temperature[part, None]
            tokens[part] = choose(scaled, sampling, part)
    return np.where((sampling.forced >= 0) & (tokens >= 0), sampling.forced, tokens)


def _edit(logits: FloatArray, edits: LogitsEdits) -> None:
    """Make the changes in their order. What becomes too large for float32 fails its row later."""
    with np.errstate(over="ignore", invalid="ignore"):
        logits[tuple(edits.bias.T)] += edits.bias_values
        at = tuple(edits.repetition.T)
        seen, penalty = logits[at], edits.repetition_values
        logits[at] = np.where(seen > 0, seen / penalty, seen * penalty)
        logits[tuple(edits.subtracted.T)] -= edits.subtracted_values
    at = tuple(edits.allowed.T)
    kept = logits[at]
    logits[edits.allowed_rows] = -np.inf
    logits[at] = kept
    logits[tuple(edits.banned.T)] = -np.inf


def logprobs(
    logits: FloatArray, token_ids: NDArray[np.int32], count: int
) -> tuple[NDArray[np.int32], FloatArray, NDArray[np.int32]]:
    """See `Ops.logprobs`."""
    num_rows, vocab_size = logits.shape
    rows = np.arange(num_rows)[:, None]
    count = min(count, vocab_size)
    highest = logits.max(axis=1, keepdims=True)
    numbers = np.isfinite(highest)
    if not numbers.all():  # such rows fail when they are drawn from
        logits, highest = np.where(numbers, logits, 0), np.where(numbers, highest, 0)
    with np.errstate(over="ignore"):  # -inf, a token that is never drawn, is right
        total = np.exp(logits - highest).sum(axis=1, dtype=np.float64)[:, None]
    if count:
        nth = np.partition(logits, vocab_size - count, axis=1)[:, vocab_size - count]
        row, token = np.nonzero(logits >= nth[:, None])
        order = np.lexsort((-logits[row, token], row))  # stable: ties by token id
        row, token = row[order], token[order]
        starts = np.flatnonzero(np.diff(row, prepend=-1))
        likeliest = token[starts[:, None] + np.arange(count)]
    else:
        likeliest = np.zeros((num_rows, 0), np.int64)
    ids = np.concatenate([token_ids[:, None], likeliest], axis=1).astype(np.int32)
    own_rank = (logits >= logits[rows, ids[:, :1]]).sum(axis=1)[:, None]
    ranks = np.concatenate([own_rank, np.broadcast_to(np.arange(1, count + 1), likeliest.shape)], 1)
    with np.errstate(over="ignore"):
        values = logits[rows, ids] - highest - np.where(numbers, np.log(total), np.nan)
    return ids, values.astype(np.float32), ranks.astype(np.int32)


def _draw_from_all(scaled: FloatArray, sampling: SamplingBatch, rows: IntArray) -> IntArray:
    """Every token may be drawn. scaled: [len(rows), vocab_size], 0 at the likeliest token."""
    vocab_size = scaled.shape[1]
    counters = np.arange(-(-vocab_size // WORDS), dtype=np.uint64)
    words = philox(
        (
            counters[None, :],
            sampling.output_position[rows, None].astype(np.uint64),
            sampling.sample_index[rows, None].astype(np.uint64),
            np.zeros((1, 1), np.uint64),
        ),
        sampling.seed[rows, None],
    )
    noise = gumbel(np.stack(words, axis=-1)).reshape(len(rows), -1)[:, :vocab_size]
    noise += scaled
    best: IntArray = np.argmax(noise, axis=1)
    return best


def _draw_limited(scaled: FloatArray, sampling: SamplingBatch, rows: IntArray) -> IntArray:
    """Keep min_p, then top_k, then top_p of what is left, and draw from that."""
    row, token, value = _rank(scaled, sampling, rows)
    starts = np.flatnonzero(np.diff(row, prepend=-1))
    of_row = sampling.seed[rows], sampling.output_position[rows], sampling.sample_index[rows]
    seed, position, index = (a[row].astype(np.uint64) for a in of_row)
    words = philox((token.astype(np.uint64) // WORDS, position, index, np.zeros_like(seed)), seed)
    word = np.choose(token % WORDS, words)
    score = value + gumbel(word)
    best = np.maximum.reduceat(score, starts)
    hits = np.where(score == best[row], token, scaled.shape[1])
    lowest: IntArray = np.minimum.reduceat(hits, starts)
    return lowest


def _rank(
    scaled: FloatArray, sampling: SamplingBatch, rows: IntArray
) -> tuple[IntArray, IntArray, FloatArray]:
    """The kept tokens of each row as flat (row, token, scaled logit), likeliest first."""
    vocab_size = scaled.shape[1]
    top_k, top_p = sampling.top_k[rows].astype(np.int64), sampling.top_p[rows].astype(np.float64)
    top_k = np.where(top_k < vocab_size, top_k, 0)
    weight = np.exp(scaled.astype(np.float64))
    likely = weight >= sampling.min_p[rows, None]
    weight[~likely] = 0.0
    mass = np.rint(weight * _MASS_UNIT).astype(np.int64)
    total = mass.sum(axis=1)
    # Tokens lighter than this, all together, weigh less than what top_p leaves out.
    lightest = np.floor((1.0 - top_p) * total / vocab_size).astype(np.int64)
    candidate = mass >= lightest[:, None]
    with_k = np.flatnonzero(top_k)
    if len(with_k):
        nth = vocab_size - top_k[with_k]
        ordered = np.partition(scaled[with_k], np.unique(nth), axis=1)
        candidate[with_k] = scaled[with_k] >= ordered[np.arange(len(with_k)), nth][:, None]
    row, token = np.nonzero(candidate & likely)
    value = scaled[row, token]
    order = np.lexsort((-value, row))  # stable: equal values stay in order of their token ids
    row, token, value = row[order], token[order], value[order]
    starts = np.flatnonzero(np.diff(row, prepend=-1))
    rank = np.arange(len(row)) - starts[row]
    kept = (top_k[row] == 0) | (rank < top_k[row])
    row, token, value, rank = row[kept], token[kept], value[kept], rank[kept]
    kept_mass = mass[row, token]
    starts = np.flatnonzero(rank == 0)
    summed = np.cumsum(kept_mass)
    before = summed - kept_mass
    before -= before[starts][row]
    total = np.where(top_k > 0, np.add.reduceat(kept_mass, starts), total)
    kept = (before < top_p[row] * total[row]) | (rank == 0)
    return row[kept], token[kept], value[kept]
