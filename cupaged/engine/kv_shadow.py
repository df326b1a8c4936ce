"""What every slot of the KV pool must hold, and whether a step may do what its batch says.

The shadow of a slot is a digest of the tokens whose keys and values were written there, from the
sequence's first token to the slot's own, or nothing if the slot was not written since its block was
handed out (the shadow memory of AddressSanitizer and MemorySanitizer, Serebryany et al., USENIX ATC
2012, and Stepanov and Serebryany, CGO 2015). A sequence that reads a slot must find the digest of
its own tokens: whoever shares a block rightly does. All is derived from the plan, the batch and the
block manager's tables when a step is submitted. The pool itself is never touched here.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.engine.batch import Batch, StepPlan
from cupaged.engine.block_history import BlockHistory
from cupaged.engine.block_manager import UNUSED, BlockManager
from cupaged.engine.token_digests import Digests, Ids, chain, ranges, salt
from cupaged.errors import KVSanitizerError
from cupaged.ops.kv_checked_runtime import KVTags
from cupaged.request import Sequence

__all__ = ["KVShadow", "StepSlots"]

_UNWRITTEN = np.uint64(0)  # the digest of no tokens that ever come
_KNOWN_NAMES = 1024  # of requests, beside those of the running ones


@dataclass(frozen=True, slots=True)
class StepSlots:
    """What the blocks that a step writes to must be like after it.

    blocks: [n], each once. owners: [n], the plan's sequence that writes it.
    is_new: bool [n, block_size], slots that the step writes. is_written: those and all before.
    is_clean: bool [n], blocks whose other slots hold poison.
    start, num_samples: [num_seqs], tokens of each sequence before the step, and draws after it.
    own: int32 [num_seqs, ...], rows of the block table. swap_out, swap_in: as in the plan.
    """

    step_id: int
    sequences: list[Sequence]
    blocks: Ids
    owners: Ids
    is_new: NDArray[np.bool_]
    is_written: NDArray[np.bool_]
    is_clean: NDArray[np.bool_]
    start: Ids
    num_samples: Ids
    own: NDArray[np.int32]
    swap_out: list[tuple[int, int]]
    swap_in: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Columns:
    """A plan, an entry a sequence: [num_seqs]; and its rows of the block table as they are now."""

    sequences: list[Sequence]
    start: Ids
    end: Ids
    own: NDArray[np.int32]


class KVShadow:
    """The shadow of one pool. `follow`, then `check`, for every plan in the order of submission."""

    def __init__(self, manager: BlockManager) -> None:
        self.history = BlockHistory()
        self._manager = manager
        self._block_size = manager.block_size
        self._digests: Digests = np.zeros((manager.num_blocks, manager.block_size), np.uint64)
        self._is_clean = np.zeros(manager.num_blocks, np.bool_)  # unwritten slots are poison
        self._host: dict[int, tuple[Digests, bool]] = {}  # the same of blocks on the host
        self._generations = manager.generations.copy()  # as last seen
        self._num_holders: Ids = np.zeros(manager.num_blocks, np.int64)  # rows that name each block
        self._marks: NDArray[Any] = np.zeros(manager.num_blocks)  # other holders, other marks
        self._names: dict[int, str] = {}  # of requests, by arrival

    # ---- what happened to blocks since the last step --------------------------------------------

    def follow(self, plan: StepPlan) -> Ids:
        """Learn who holds what now, and what goes to the host; returns the blocks to be poisoned.

        That are those whose content is worth nothing: handed out, or free and not to be found. What
        the step itself swaps out is left as it is.
        """
        manager = self._manager
        for source, destination in plan.swap_out:
            self._host[destination] = self._digests[source].copy(), bool(self._is_clean[source])
            what = f"swapped out to block {destination} of the host"
            self.history.note(source, plan.step_id, what)
        is_leaving = np.zeros(manager.num_blocks, np.bool_)
        is_leaving[[source for source, _ in plan.swap_out]] = True
        rows = manager.held_rows
        self._learn_names(plan, rows)
        is_fresh = manager.generations != self._generations
        self._generations[:] = manager.generations
        changed = self._count_holders(rows) | is_fresh
        holders = self._holders(changed, rows)
        for block in np.flatnonzero(changed).tolist():
            who = ", ".join(holders.get(block, ()))
            what = f"held by {who}" if who else "given back"
            if is_fresh[block]:
                what = f"handed out to {who or 'nobody'}"
            self.history.note(block, plan.step_id, what)
        free = manager.forgotten_blocks()
        is_stale = np.zeros(manager.num_blocks, np.bool_)
        is_stale[free] = self._digests[free].any(axis=1)
        is_stale &= ~is_leaving
        for block in np.flatnonzero(is_stale & ~is_fresh).tolist():
            self.history.note(block, plan.step_id, "poisoned")
        is_stale |= is_fresh
        self._digests[is_stale] = _UNWRITTEN
        self._is_clean[is_stale] = ~is_leaving[is_stale]
        return np.flatnonzero(is_stale & ~is_leaving)

    def _learn_names(self, plan: StepPlan, rows: dict[Hashable, int]) -> None:
        for entry in plan.scheduled:
            request = entry.sequence.request
            self._names[request.arrival] = request.core.request_id
        if len(self._names) > 2 * len(rows) + _KNOWN_NAMES:
            arrivals = {key[0] for key in rows if isinstance(key, tuple)}
            self._names = {a: name for a, name in self._names.items() if a in arrivals}

    def _count_holders(self, rows: dict[Hashable, int]) -> NDArray[np.bool_]:
        """Bring the counts up to date; bool [num_blocks], where the holders are others now."""
        num_blocks = self._manager.num_blocks
        table = self._manager.block_table[list(rows.values())]
        row, column = np.nonzero(table != UNUSED)
        blocks: NDArray[np.int32] = table[row, column]
        marks = np.array([1.0 + hash(key) % 2**31 for key in rows])
        self._num_holders = np.bincount(blocks, minlength=num_blocks)
        sums = np.bincount(blocks, marks[row], num_blocks)
        changed: NDArray[np.bool_] = sums != self._marks
        self._marks = sums
        return changed

    def _holders(
        self, wanted: NDArray[np.bool_], rows: dict[Hashable, int]
    ) -> dict[int, list[str]]:
        """Who holds the wanted blocks; wanted: bool [num_blocks]."""
        if not rows or not wanted.any():
            return {}
        keys, numbers = list(rows), list(rows.values())
        table = self._manager.block_table[numbers]
        holders: dict[int, list[str]] = {}
        found, columns = np.nonzero((table != UNUSED) & wanted[np.maximum(table, 0)])
        for i, block in zip(found.tolist(), table[found, columns].tolist(), strict=True):
            holders.setdefault(block, []).append(self._label(keys[i]))
        return holders

    def _label(self, key: Hashable) -> str:
        if not isinstance(key, tuple):
            return f"sequence {key!r}"
        arrival, index = key
        name = self._names.get(arrival)
        return f"request {arrival if name is None else repr(name)} sample {index}"

    # ---- one step -------------------------------------------------------------------------------

    def check(self, plan: StepPlan, batch: Batch) -> StepSlots:
        """Whether the step keeps to the rules; its writes are in the shadow from now on.

        Raises:
            KVSanitizerError: it reads what was not written for it, or writes what is not its own.
        """
        columns = self._columns(plan)
        self._swap_in(plan)
        self._copy(plan.step_id, batch)
        tables = batch.groups[0]
        sequence, positions = ranges(columns.start, columns.end)
        self._check_writes(plan.step_id, columns, sequence, positions, tables.slot_mapping)
        self._check_shared(plan.step_id, columns, sequence, tables.slot_mapping)
        expected, first = self._expect(columns)
        self._write(batch, columns, expected, first)
        self._check_reads(plan.step_id, batch, columns, expected)
        return self._note_writes(plan, columns, sequence, tables.slot_mapping)

    def tags(self, plan: StepPlan, batch: Batch) -> KVTags:
        """What the kernels of a checked step must find and leave in the pool."""
        size, columns = self._block_size, self._columns(plan)
        blocks = np.arange(self._manager.num_blocks)
        numbers = (self._generations.astype(np.int64) * len(blocks) + blocks + 1) * size
        tag_of = numbers.astype(np.int32)  # modulo 2^32: no two that can meet are equal
        own = columns.own[:, : batch.groups[0].block_table.shape[1]]
        sequence, positions = ranges(columns.start, columns.end)
        write = tag_of[own[sequence, positions // size]] + (positions % size).astype(np.int32)
        restored = [
            (block, np.where(self._digests[block], tag_of[block] + np.arange(size), 0))
            for _, block in plan.swap_in
        ]
        return KVTags(
            plan.step_id,
            np.where(own == UNUSED, np.int32(0), tag_of[own]),
            write,
            tag_of[batch.copies],
            [(block, row.astype(np.int32)) for block, row in restored],
        )

    def forget(self, step: StepSlots) -> None:
        """The step failed: what it was to write is not there."""
        digests = self._digests[step.blocks]
        digests[step.is_new] = _UNWRITTEN
        self._digests[step.blocks] = digests
        for block in step.blocks.tolist():
            self.history.note(block, step.step_id, "the step failed")
        for _, host in step.swap_out:
            self._host.pop(host, None)
        for _, block in step.swap_in:
            self._digests[block] = _UNWRITTEN
            self.history.note(block, step.step_id, "the step failed")

    def fault(
        self,
        step_id: int,
        sequence: Sequence | None,
        what: str,
        block: int,
        slot: int,
        *,
        layer: int | None = None,
        why: str,
    ) -> KVSanitizerError:
        """The error, with all that is known about the block."""
        history = self.history.tell(block)
        who = "a copy" if sequence is None else self._label(sequence.order)
        where = f"slot {slot} of block {block}" + ("" if layer is None else f" in layer {layer}")
        told = "".join(f"\n  {event}" for event in history) or " nothing"
        return KVSanitizerError(
            f"KV sanitizer: step {step_id}: {who} {what} {where}: {why}\nblock {block}:{told}",
            request_id=None if sequence is None else sequence.request.core.request_id,
            layer=layer,
            block=block,
            slot=slot,
            history=history,
        )

    def _columns(self, plan: StepPlan) -> _Columns:
        entries, manager = plan.scheduled, self._manager
        sequences = [e.sequence for e in entries]
        for i, sequence in enumerate(sequences):
            if not manager.holds_blocks(sequence.order):
                block = int(plan.block_tables[0][i, 0])
                why = "the sequence holds no blocks"
                raise self.fault(plan.step_id, sequence, "reads", block, 0, why=why)
        start = np.array([e.start for e in entries], np.int64)
        num_new = np.array([e.num_tokens for e in entries], np.int64)
        rows = [manager.row(s.order) for s in sequences]
        return _Columns(sequences, start, start + num_new, manager.block_table[rows])

    def _swap_in(self, plan: StepPlan) -> None:
        for source, destination in plan.swap_in:
            why = None
            if source not in self._host:
                why = f"nothing was swapped out to block {source} of the host, where it comes from"
            elif not self._num_holders[destination]:
                why = "no sequence holds the block"
            if why is not None:
                raise self.fault(plan.step_id, None, "writes", destination, 0, why=why)
            what = f"swapped in from block {source} of the host"
            self.history.note(destination, plan.step_id, what)
            self._digests[destination], self._is_clean[destination] = self._host[source]

    def _copy(self, step_id: int, batch: Batch) -> None:
        sources, destinations = batch.copies.T
        for source, destination in batch.copies.tolist():
            if not self._digests[source, 0]:
                why = "nothing was written there since the block was handed out"
                raise self.fault(step_id, None, "reads", source, 0, why=why)
            num_holders = int(self._num_holders[destination])
            if num_holders != 1:
                why = f"{num_holders} sequences hold the block"
                raise self.fault(step_id, None, "writes", destination, 0, why=why)
            self.history.note(destination, step_id, f"copied from block {source}")
        self._digests[destinations] = self._digests[sources]
        self._is_clean[destinations] = self._is_clean[sources]

    def _check_writes(
        self, step_id: int, columns: _Columns, sequence: Ids, positions: Ids, slots: Ids
    ) -> None:
        size = self._block_size
        blocks = columns.own[sequence, positions // size].astype(np.int64)
        wrong = (slots != blocks * size + positions % size) | (blocks == UNUSED)
        if not wrong.any():
            return
        token = int(wrong.argmax())
        block, slot = divmod(int(slots[token]), size)
        own, position = int(blocks[token]), int(positions[token])
        writer = columns.sequences[sequence[token]]
        why = f"position {position} belongs into slot {position % size} of block {own}"
        if own == UNUSED:
            why = f"it holds no block for position {position}"
        raise self.fault(step_id, writer, "writes", block, slot, why=why)

    def _check_shared(self, step_id: int, columns: _Columns, sequence: Ids, slots: Ids) -> None:
        blocks = slots // self._block_size
        num_refs = np.maximum(self._manager.ref_counts[blocks], self._num_holders[blocks])
        wrong = (num_refs > 1) | (self._manager.ref_counts[blocks] == 0)
        if not wrong.any():
            return
        token = int(wrong.argmax())
        block, slot = divmod(int(slots[token]), self._block_size)
        is_free = not self._manager.ref_counts[block]
        why = "the block was given back" if is_free else f"{num_refs[token]} sequences share it"
        writer = columns.sequences[sequence[token]]
        raise self.fault(step_id, writer, "writes", block, slot, why=why)

    def _expect(self, columns: _Columns) -> tuple[Digests, Ids]:
        """Digests of all tokens up to the step's last ones, one sequence after another, and where
        each sequence begins among them."""
        end = columns.end.tolist()
        tokens = np.fromiter(
            itertools.chain.from_iterable(
                s.token_ids[:n] for s, n in zip(columns.sequences, end, strict=True)
            ),
            np.uint64,
            sum(end),
        )
        first = np.cumsum(columns.end) - columns.end
        positions = np.arange(len(tokens)) - np.repeat(first, columns.end)
        salts = np.array([salt(s.request) for s in columns.sequences], np.uint64)
        return chain(tokens, positions, salts, first, columns.end), first

    def _write(self, batch: Batch, columns: _Columns, expected: Digests, first: Ids) -> None:
        """Each new token leaves the digest of what the batch computes there."""
        salts = np.array([salt(s.request) for s in columns.sequences], np.uint64)
        before = np.where(columns.start > 0, expected[first + columns.start - 1], salts)
        num_new = columns.end - columns.start
        written = chain(
            batch.token_ids.astype(np.uint64),
            batch.positions.astype(np.int64),
            before,
            np.cumsum(num_new) - num_new,
            num_new,
        )
        self._digests.reshape(-1)[batch.groups[0].slot_mapping] = written

    def _check_reads(
        self, step_id: int, batch: Batch, columns: _Columns, expected: Digests
    ) -> None:
        size, manager = self._block_size, self._manager
        beyond = batch.context_len > columns.end
        if beyond.any():
            i = int(beyond.argmax())
            position = int(columns.end[i])
            blocks = batch.groups[0].block_table[i]
            block = int(blocks[min(position // size, len(blocks) - 1)])
            why = f"position {position} lies beyond the sequence's tokens"
            raise self.fault(
                step_id, columns.sequences[i], "reads", block, position % size, why=why
            )
        sequence, positions = ranges(np.zeros_like(columns.end), columns.end)
        blocks = batch.groups[0].block_table[sequence, positions // size]
        is_foreign = blocks != columns.own[sequence, positions // size]
        is_foreign |= (blocks < 0) | (blocks >= manager.num_blocks)
        inside = np.where(is_foreign, 0, blocks)
        is_free = manager.ref_counts[inside] == 0
        held = self._digests[inside, positions % size]
        wrong = is_foreign | is_free | (held != expected)
        if not wrong.any():
            return
        at = int(wrong.argmax())
        if is_foreign[at]:
            why = "the sequence does not own the block"
        elif is_free[at]:
            why = "the block was given back"
        elif held[at] == _UNWRITTEN:
            why = "nothing was written there since the block was handed out"
        else:
            why = "other tokens than the sequence's own lie there"
        why = f"{why} (position {positions[at]})"
        reader, block = columns.sequences[sequence[at]], int(blocks[at])
        raise self.fault(step_id, reader, "reads", block, int(positions[at] % size), why=why)

    def _note_writes(
        self, plan: StepPlan, columns: _Columns, sequence: Ids, slots: Ids
    ) -> StepSlots:
        size = self._block_size
        blocks, index, inverse = np.unique(slots // size, return_index=True, return_inverse=True)
        is_new = np.zeros((len(blocks), size), np.bool_)
        is_new[inverse, slots % size] = True
        owners = sequence[index]
        last = size - 1 - is_new[:, ::-1].argmax(axis=1)
        for block, owner, low, high in zip(
            blocks.tolist(), owners.tolist(), is_new.argmax(axis=1).tolist(), last.tolist(),
            strict=True,
        ):  # fmt: skip
            who = self._label(columns.sequences[owner].order)
            self.history.wrote(block, plan.step_id, who, low, high)
        return StepSlots(
            step_id=plan.step_id,
            sequences=columns.sequences,
            blocks=blocks,
            owners=owners,
            is_new=is_new,
            is_written=self._digests[blocks] != _UNWRITTEN,
            is_clean=self._is_clean[blocks],
            start=columns.start,
            num_samples=np.array([e.num_samples for e in plan.scheduled], np.int64),
            own=columns.own,
            swap_out=plan.swap_out,
            swap_in=plan.swap_in,
        )
