"""How the tokens of a step are drawn, as flat arrays: the sampling half of the batch page.

A row of logits belongs to one sequence; a sample is one token drawn from a row. What a request asks
of its logits (penalties, biases, bans, an allowed set) is worked out here, on the host, into lists
of (row, token id, value), so that every device makes the same few edits. A request that asks for
nothing costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from cupaged.engine.sequence_table import NONE, Records
from cupaged.logits_rules import LogitsRules
from cupaged.request import Sequence

MAX_PENALTY = 1e30  # float32 holds it, its inverse, and what they make of a logit

Ids = NDArray[np.int32]
Values = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LogitsEdits:
    """Changes to the logits before anything is drawn, to be made in this order.

    bias: bias_values [n] are added. repetition: a logit above 0 is divided by the value, one below
    is multiplied. subtracted: the values are taken off (presence and frequency penalties in one).
    allowed_rows: int32 [m], rows in which only the `allowed` pairs may be drawn.
    banned: pairs that must not be drawn.

    Pairs are int32 [n, 2], (row of logits, token id). Within bias, repetition and subtracted no
    pair stands twice.
    """

    bias: Ids
    bias_values: Values
    repetition: Ids
    repetition_values: Values
    subtracted: Ids
    subtracted_values: Values
    allowed_rows: Ids
    allowed: Ids
    banned: Ids


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The draws of a step, one entry a sample; several samples may share a row of logits.

    logits_row: int32 [num_samples], index into the step's logits.
    temperature, top_p, min_p: float32 [num_samples]; temperature 0 is greedy.
    top_k: int32 [num_samples]; 0 means all.
    seed: uint64 [num_samples]; sample_index, output_position: int32 [num_samples]. Together they
        key the random numbers of the draw.
    forced: int32 [num_samples]; the token to take whatever is drawn, -1 for none.
    num_logprobs: int32 [num_samples]; likeliest tokens to report beside the drawn one, at most the
        vocabulary; -1 for no report at all.
    edits: changes to the logits, None for none.
    """

    logits_row: Ids
    temperature: Values
    top_p: Values
    min_p: Values
    top_k: Ids
    seed: NDArray[np.uint64]
    sample_index: Ids
    output_position: Ids
    forced: Ids
    num_logprobs: Ids
    edits: LogitsEdits | None


def build_sampling(drawn: list[Sequence], records: Records, num_samples: Ids) -> SamplingBatch:
    """The draws of the sequences whose last token is computed in the step.

    Args:
        drawn: one sequence a row of logits.
        records: `RECORD` [len(drawn)], what the sequences' table says of them.
        num_samples: int32 [len(drawn)], tokens to draw from each row.
    """
    logits_row = np.repeat(np.arange(len(drawn), dtype=np.int32), num_samples)
    starts = np.cumsum(num_samples) - num_samples
    since_first = np.arange(len(logits_row)) - np.repeat(starts, num_samples)
    position = records["num_tokens"] - records["num_prompt_tokens"]
    forced = np.full(len(drawn), NONE, np.int32)
    for i in np.flatnonzero(records["has_forced_tokens"]).tolist():
        tokens, at = drawn[i].request.core.params.trace_decode_token_ids or (), int(position[i])
        forced[i : i + 1] = tokens[at : at + 1] or NONE
    return SamplingBatch(
        logits_row=logits_row,
        temperature=records["temperature"][logits_row],
        top_p=records["top_p"][logits_row],
        min_p=records["min_p"][logits_row],
        top_k=records["top_k"][logits_row],
        seed=records["seed"][logits_row],
        sample_index=records["index"][logits_row] + since_first.astype(np.int32),
        output_position=position[logits_row],
        forced=forced[logits_row],
        num_logprobs=records["num_logprobs"][logits_row],
        edits=build_edits([(i, drawn[i]) for i in np.flatnonzero(records["has_rules"]).tolist()]),
    )


def build_edits(drawn: Iterable[tuple[int, Sequence]]) -> LogitsEdits | None:
    """What the requests' rules change in rows of logits, given with the sequence of each."""
    ruled = [(i, s, s.request.rules) for i, s in drawn if s.request.rules is not None]
    if not ruled:
        return None
    rows = np.array([i for i, _, _ in ruled], np.int32)
    rules = [r for _, _, r in ruled]
    outputs = [s.token_ids[s.request.num_prompt_tokens :] for _, s, _ in ruled]
    repetition = np.array([r.repetition for r in rules]).clip(1 / MAX_PENALTY, MAX_PENALTY)
    presence = np.array([r.presence for r in rules], np.float32)
    frequency = np.array([r.frequency for r in rules], np.float32)
    seen, seen_of, _ = _count(
        rows, [s.token_ids if r.repetition != 1.0 else () for _, s, r in ruled]
    )
    counted, counted_of, counts = _count(
        rows,
        [o if r.presence or r.frequency else () for o, r in zip(outputs, rules, strict=True)],
    )
    allowed = [r.allowed_ids for r in rules]
    limited = np.fromiter(map(len, allowed), np.int64) > 0
    early = [
        r.early_ids[: None if num_tokens < r.min_tokens else 0]
        for num_tokens, r in zip(map(len, outputs), rules, strict=True)
    ]
    return LogitsEdits(
        bias=_pairs(rows, [r.bias_ids for r in rules]),
        bias_values=np.concatenate([r.bias_values for r in rules]),
        repetition=seen,
        repetition_values=repetition.astype(np.float32)[seen_of],
        subtracted=counted,
        subtracted_values=presence[counted_of] + frequency[counted_of] * counts,
        allowed_rows=rows[limited],
        allowed=_pairs(rows, allowed),
        banned=np.concatenate([_pairs(rows, early), _bad_words(rows, outputs, rules)]),
    )


def _pairs(rows: Ids, ids: list[Ids]) -> Ids:
    """(row, id) for each id of each row."""
    repeated = np.repeat(rows, np.fromiter(map(len, ids), np.int64))
    return np.stack([repeated, np.concatenate(ids).astype(np.int32)], axis=1)


def _count(rows: Ids, ids: list[Iterable[int]]) -> tuple[Ids, NDArray[np.int64], Values]:
    """Each different (row, id) once; the index of its row among `rows`; how often it stands."""
    lengths = np.fromiter(map(len, ids), np.int64)  # type: ignore[arg-type]
    flat = np.fromiter(chain.from_iterable(ids), np.int64, int(lengths.sum()))
    of = np.repeat(np.arange(len(rows)), lengths)
    keys, counts = np.unique(of << 32 | flat, return_counts=True)
    of = keys >> 32
    pairs = np.stack([rows[of], (keys & 0xFFFFFFFF).astype(np.int32)], axis=1)
    return pairs, of, counts.astype(np.float32)


def _bad_words(rows: Ids, outputs: list[list[int]], rules: list[LogitsRules]) -> Ids:
    """The last token of each bad word that the output has otherwise finished."""
    banned = [
        (row, token)
        for row, output, rule in zip(rows.tolist(), outputs, rules, strict=True)
        if rule.bad_words
        for token in rule.banned_after(output)
    ]
    return np.array(banned, np.int32).reshape(-1, 2)
