"""Tokens of answers that came as texts, counted when the run is over.

A server that streams texts may tell at the end how many tokens an answer had: then that is the
number. Otherwise it is that of the tokenizer, if one is given; otherwise a message counts as one
token, which is too few wherever a server sends several tokens together. The tokens are spread over
the messages as their own counts are, or their lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

from cupaged.benchmarks.datasets import CountTokens, Sample
from cupaged.benchmarks.load import RequestRecord

__all__ = ["COUNTED_BY", "settle", "spread"]

COUNTED_BY = ("server", "tokenizer", "messages")


def settle(
    records: Sequence[RequestRecord], samples: Sequence[Sample], count: CountTokens | None
) -> str:
    """Fill in what the server has not told of its answers.

    Args:
        records: of a run; those with `message_texts` are changed.
        samples: the requests, in the same order.
        count: tokens of texts, by a tokenizer; None for none.

    Returns:
        Who counted: of `COUNTED_BY` the last that was needed.
    """
    weakest = 0
    for record, sample in zip(records, samples, strict=True):
        texts = record.message_texts
        if record.error_code:
            continue
        if not record.has_usage:
            weakest = max(weakest, 1 if count is not None else 2)
            record.prompt_tokens = _prompt_tokens(sample, count)
            record.output_tokens = len(texts) if count is None else count(["".join(texts)])[0]
        if texts:
            shares = [len(text) for text in texts] if count is None else count(texts)
            record.message_tokens = spread(record.output_tokens, shares)
    return COUNTED_BY[weakest]


def spread(total: int, shares: Sequence[int]) -> list[int]:
    """Whole numbers in proportion to `shares`, whose sum is `total`."""
    whole = sum(shares)
    if not whole:
        shares, whole = [1] * len(shares), len(shares)
    found, given, so_far = [], 0, 0
    for share in shares:
        so_far += share
        up_to = (2 * total * so_far + whole) // (2 * whole)
        found.append(up_to - given)
        given = up_to
    return found


def _prompt_tokens(sample: Sample, count: CountTokens | None) -> int:
    if sample.prompt_tokens is not None:
        return sample.prompt_tokens
    return count([str(sample.prompt)])[0] if count is not None else 0
