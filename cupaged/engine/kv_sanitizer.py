"""The KV sanitizer: a runner around another, which finds memory errors of the KV pool.

Before a step is computed, `KVShadow` checks what it reads and writes, and blocks whose content is
worth nothing any more are poisoned. After the step every slot that it should have written is
looked at in every layer, and the slots behind them must still be poison. Decided when the engine is
built: an engine without it has no trace of it in its steps.
"""

from __future__ import annotations

import numpy as np

from cupaged.engine.batch import StepPlan, build_batch
from cupaged.engine.block_manager import UNUSED, BlockManager
from cupaged.engine.kv_memory import HoldsKV, KernelChecks, KVMemory
from cupaged.engine.kv_shadow import KVShadow, StepSlots
from cupaged.engine.runner import FAILED_TOKEN, Runner, StepOutput

__all__ = ["SanitizedRunner"]


class SanitizedRunner:
    """Checks every step of `inner`. A runner that is not `HoldsKV` has its plans checked alone."""

    def __init__(self, inner: Runner, manager: BlockManager) -> None:
        self.inner = inner
        self._block_size = manager.block_size
        self._shadow = KVShadow(manager)
        self._memory: KVMemory | None = inner.kv_memory if isinstance(inner, HoldsKV) else None
        self._kernel_checks = None if self._memory is None else self._memory.kernel_checks
        self._in_flight: dict[int, StepSlots] = {}

    def submit(self, plan: StepPlan) -> int:
        """Check the step, then hand it on.

        Raises:
            KVSanitizerError: it would read or write what it must not; nothing was computed.
        """
        stale = self._shadow.follow(plan)
        if self._memory is not None and len(stale):
            self._memory.poison(stale)
        batch = build_batch(plan, self._block_size)
        slots = self._shadow.check(plan, batch)
        if self._kernel_checks is not None:
            self._kernel_checks.expect(self._shadow.tags(plan, batch))
        try:
            handle = self.inner.submit(plan)
        except BaseException as error:
            self._give_up(slots, error)
            raise
        self._in_flight[handle] = slots
        return handle

    def collect(self, handle: int) -> StepOutput:
        """Wait for the step, then look at what it has written.

        Raises:
            KVSanitizerError: it has not written what it should, or more; or one of its kernels has
                read what it must not.
        """
        slots = self._in_flight.pop(handle)
        try:
            output = self.inner.collect(handle)
        except BaseException as error:
            self._give_up(slots, error)
            raise
        if self._kernel_checks is not None:
            self._check_kernels(self._kernel_checks, slots)
        if self._memory is not None:
            if any(FAILED_TOKEN in tokens for tokens in output.token_ids):
                self._check_context(self._memory, slots, output)
            self._check_written(self._memory, slots)
        return output

    def _give_up(self, slots: StepSlots, error: BaseException) -> None:
        """The step failed; perhaps because a kernel went astray, which is the better thing to say.

        Raises:
            KVSanitizerError: it did.
        """
        self._shadow.forget(slots)
        if self._kernel_checks is not None and isinstance(error, Exception):
            self._check_kernels(self._kernel_checks, slots)

    def _check_kernels(self, checks: KernelChecks, slots: StepSlots) -> None:
        found = checks.misread()
        if found is None:
            return
        known = {step.step_id: step for step in (slots, *self._in_flight.values())}
        step = known[found.step_id]
        column, slot = divmod(found.position, self._block_size)
        own = step.own[found.sequence]
        right = int(own[column]) if column < len(own) else UNUSED
        if right == UNUSED:
            why = f"position {found.position} lies beyond the sequence's blocks"
        elif (found.block, found.slot) == (right, slot):
            why = f"no kernel has written position {found.position} since the block was handed out"
        else:
            why = f"position {found.position} lies in slot {slot} of block {right}"
        reader = step.sequences[found.sequence]
        raise self._shadow.fault(
            step.step_id, reader, "has read", found.block, found.slot, layer=found.layer, why=why
        )

    def _check_context(self, memory: KVMemory, slots: StepSlots, output: StepOutput) -> None:
        """Where results are no numbers: whether what earlier steps wrote for them is poison now."""
        drawn = np.repeat(np.arange(len(slots.sequences)), slots.num_samples).tolist()
        for index, tokens in zip(drawn, output.token_ids, strict=True):
            start = int(slots.start[index])
            if FAILED_TOKEN not in tokens or not start:
                continue
            blocks = slots.own[index, : -(-start // self._block_size)].astype(np.int64)
            for layer in range(memory.num_layers):
                share = memory.poisoned_share(layer, blocks).reshape(-1)[:start]
                if not share.any():
                    continue
                column, slot = divmod(int(share.argmax()), self._block_size)
                raise self._shadow.fault(
                    slots.step_id,
                    slots.sequences[index],
                    "has read",
                    int(blocks[column]),
                    slot,
                    layer=layer,
                    why="it holds poison, and the result is not a number",
                )

    def _check_written(self, memory: KVMemory, slots: StepSlots) -> None:
        """Slots that hold tokens hold no poison, and all others nothing else."""
        for layer in range(memory.num_layers):
            share = memory.poisoned_share(layer, slots.blocks)
            wrong = np.where(slots.is_written, share > 0.0, (share < 1.0) & slots.is_clean[:, None])
            if not wrong.any():
                continue
            at, slot = (int(i) for i in np.unravel_index(int(wrong.argmax()), wrong.shape))
            block, writer = int(slots.blocks[at]), slots.sequences[slots.owners[at]]
            what = "has not written"
            if not slots.is_written[at, slot]:
                what, why = "has written", "no token of the step belongs there"
            elif share[at, slot] < 1.0:
                why = "a part of it holds poison, or what was computed from poison"
            elif slots.is_new[at, slot]:
                why = "it still holds poison, or what was computed from poison"
            else:
                what, why = "has damaged", "it holds poison, though it was written before"
            raise self._shadow.fault(slots.step_id, writer, what, block, slot, layer=layer, why=why)
