"""What every step needs to know of the running sequences, as one NumPy record a sequence.

A running sequence has the same row here and in the block table. What happens to all sequences at
every step is arithmetic on these columns; Python touches only those that begin, end, or cross the
edge of a block. The token ids themselves are the sequence's own list: here are their number and
the last one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.request import Sequence
from cupaged.sampling_params import GREEDY_TEMPERATURE

MAX_TEMPERATURE = 1e6  # beyond it the draw is uniform anyway, and float32 holds it
MAX_COUNT = 2**31 - 1  # what int32 holds; more than any vocabulary
NONE = -1  # no forced token, no logprobs, no ending id
NUM_ENDING_IDS = 4  # a sequence with more has each of its tokens looked at by Python

RECORD = np.dtype(
    [
        ("serial", np.int64),  # unique to each time a sequence runs; NONE in a row that is free
        ("num_tokens", np.int32),
        ("num_computed_tokens", np.int32),
        ("last_token", np.int32),
        ("in_flight", np.bool_),
        ("store_at", np.int64),
        # Fixed while it runs, but for the forks of a request.
        ("num_pending_samples", np.int32),
        ("num_prompt_tokens", np.int32),
        ("max_length", np.int32),
        *((f"ending_id_{i}", np.int32) for i in range(NUM_ENDING_IDS)),
        ("has_more_ending_ids", np.bool_),
        ("has_rules", np.bool_),
        ("has_forced_tokens", np.bool_),
        ("tells_prompt", np.bool_),
        # What its draws are made of; see `SamplingBatch`.
        ("index", np.int32),
        ("seed", np.uint64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int32),
        ("num_logprobs", np.int32),
    ],
    align=True,
)
Records = NDArray[np.void]


def record_of(sequence: Sequence, serial: int = 0) -> tuple[Any, ...]:
    """A sequence as a `RECORD`."""
    request = sequence.request
    params = request.core.params
    ending = sorted(request.ending_ids)
    first = (*ending[:NUM_ENDING_IDS], *[NONE] * (NUM_ENDING_IDS - len(ending)))
    is_greedy = params.temperature < GREEDY_TEMPERATURE
    return (
        serial,
        len(sequence.token_ids),
        sequence.num_computed_tokens,
        sequence.token_ids[-1],
        sequence.in_flight,
        sequence.store_at,
        sequence.num_pending_samples,
        request.num_prompt_tokens,
        request.max_length,
        *first,
        len(ending) > NUM_ENDING_IDS,
        request.rules is not None,
        bool(params.trace_decode_token_ids),
        params.prompt_logprobs is not None,
        sequence.index,
        request.core.seed,
        0.0 if is_greedy else min(params.temperature, MAX_TEMPERATURE),
        params.top_p,
        params.min_p,
        min(params.top_k, MAX_COUNT),
        # -1 stands for all tokens there are: MAX_COUNT.
        NONE if params.logprobs is None else params.logprobs % (MAX_COUNT + 1),
    )


def are_steady(records: Records, tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Which sequences only grow by the one token that was drawn for each: nearly all.

    The others may end with it, or something is told about their tokens. All arrays are [n].
    """
    may_end = records["num_tokens"] + 1 >= records["max_length"]
    may_end |= records["has_more_ending_ids"] | (tokens < 0)
    for i in range(NUM_ENDING_IDS):
        may_end |= records[f"ending_id_{i}"] == tokens
    tells = records["tells_prompt"] | (records["num_logprobs"] != NONE)
    steady: NDArray[np.bool_] = ~(may_end | tells)
    return steady


class SequenceTable:
    """`records`, `RECORD` [max_num_seqs], by row of the block table."""

    def __init__(self, max_num_seqs: int) -> None:
        self.records: Records = np.zeros(max_num_seqs, RECORD)
        self.records["serial"] = NONE
        self._next_serial = 0

    def enter(self, sequence: Sequence, row: int) -> None:
        """The sequence runs from now on, in a row that is free."""
        self.records[row] = record_of(sequence, self._next_serial)
        self._next_serial += 1
        sequence.row, sequence.record = row, self.records[row]

    def leave(self, sequence: Sequence) -> None:
        """The sequence does not run any more; it keeps what its record says."""
        self.records["serial"][sequence.row] = NONE
        sequence.detach()

    def grow(self, rows: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        """Each of those sequences has one more token, which the caller appends to its list."""
        self.records["num_tokens"][rows] += 1
        self.records["last_token"][rows] = tokens

    def are_running(self, rows: NDArray[np.int32], records: Records) -> NDArray[np.bool_]:
        """Which of the sequences that had those rows and records once have them still."""
        same: NDArray[np.bool_] = self.records["serial"][rows] == records["serial"]
        return same

    def audit(self, running: Iterable[Sequence]) -> None:
        """Check that there is a right record for each running sequence, and no other."""
        sequences = list(running)
        rows = [sequence.row for sequence in sequences]
        records = self.records[rows]
        serials = records["serial"].tolist()
        expected = np.array(
            [record_of(*one) for one in zip(sequences, serials, strict=True)], RECORD
        )
        if records.tolist() != expected.tolist():  # many times as fast as comparing the arrays
            for i in np.flatnonzero(records != expected).tolist():
                order, names = sequences[i].order, RECORD.names or ()
                wrong = [name for name in names if records[i][name] != expected[i][name]]
                raise AssertionError(f"{order}: {wrong} of its record is not what it should be")
        assert (records["serial"] != NONE).all(), "a sequence runs without a record"
        assert len(rows) == len(set(rows)), "two sequences have one record"
        assert np.count_nonzero(self.records["serial"] != NONE) == len(rows), "a record is stale"
