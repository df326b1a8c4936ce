"""A step under way on the device, and what the host makes of what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupaged.engine.batch import Batch
from cupaged.ops import Download
from cupaged.outputs import TokenLogprobs

__all__ = ["StartedStep"]


@dataclass(frozen=True, slots=True)
class StartedStep:
    """A step whose downloads were started.

    drawn: tokens, and the report on some of them; of no arrays if nothing is drawn. It comes last.
    prompts: reports on tokens of prompts, in parts.
    """

    batch: Batch
    drawn: Download
    prompts: list[Download]

    def wait_for_tokens(self) -> tuple[list[list[int]], list[list[TokenLogprobs] | None]]:
        """The tokens of each sample, and what is told about them; empty if nobody asked."""
        arrays = self.drawn.wait()
        if not arrays:
            return [], []
        tokens, *report = arrays
        counts = self.batch.sampling.num_logprobs
        asking = np.flatnonzero(counts >= 0)
        logprobs: list[list[TokenLogprobs] | None] = []
        if len(asking):
            logprobs = [None] * len(tokens)
            told = _told(report, counts[asking].tolist())
            for sample, entry in zip(asking.tolist(), told, strict=True):
                logprobs[sample] = [entry]
        return tokens[:, None].tolist(), logprobs

    def wait_for_prompts(self) -> list[list[TokenLogprobs]]:
        """What is told about the prompt of each sequence; empty if nobody asked."""
        wanted = self.batch.prompt_logprobs
        if wanted is None:
            return []
        told: list[TokenLogprobs] = []
        counts = wanted.num_logprobs.tolist()
        for download in self.prompts:
            ids, *rest = download.wait()
            told += _told([ids, *rest], counts[len(told) : len(told) + len(ids)])
        ends = np.cumsum(wanted.counts).tolist()
        return [told[end - n : end] for end, n in zip(ends, wanted.counts.tolist(), strict=True)]


def _told(report: Sequence[Any], counts: list[int]) -> list[TokenLogprobs]:
    """The rows of `Ops.logprobs`, each cut to the number of likeliest tokens it asked for."""
    columns = (column.tolist() for column in report)
    return [
        TokenLogprobs(ids[: n + 1], values[: n + 1], ranks[: n + 1])
        for ids, values, ranks, n in zip(*columns, counts, strict=True)
    ]
