"""Defects of swapping to plant into a copy of the package; see `plants`."""

from __future__ import annotations

from tests.fuzz.plant import Plant

_MANAGER, _SCHEDULER = "engine/block_manager.py", "engine/scheduler.py"
_HOST_POOL, _SWAPPING = "engine/host_pool.py", "engine/swapping.py"

SWAPPING_PLANTS = (
    Plant(
        "what a group shares is swapped out once a sequence",
        _HOST_POOL,
        "if block not in host_block:",
        "if True:",
    ),
    Plant(
        "host blocks are free while a sequence still holds them",
        _HOST_POOL,
        "if not self._num_holders[block]:",
        "if True:",
    ),
    Plant(
        "what has come back is used before its step has ended",
        _SCHEDULER,
        'self.table.records["in_flight"][sequence.row] = True',
        "pass",
    ),
    Plant(
        "the last, partial block stays behind",
        _SWAPPING,
        "return self.block_manager.blocks_of(sequence.order)[:num_blocks]",
        "return self.block_manager.blocks_of(sequence.order)[: num_blocks - 1]",
    ),
    Plant(
        "a part of a group leaves",
        _SCHEDULER,
        "if position > first:",
        "if False:",
    ),
    Plant(
        "blocks that a step swaps out are free for the next step",
        _SCHEDULER,
        "[*plan.copies, *plan.swap_out]",
        "plan.copies",
    ),
    Plant(
        "what a failed step was to save counts as saved",
        _SCHEDULER,
        "self.swapping.give_up(plan.swapped_out)",
        "pass",
    ),
    Plant(
        "who ends while swapped keeps host blocks",
        _SCHEDULER,
        "self.swapping.forget(sequence)",
        "pass",
    ),
    Plant(
        "no room is kept for copies when a group comes back",
        _MANAGER,
        "num_blocks + copies > num_free",
        "num_blocks > num_free",
    ),
    Plant(
        "blocks come back in another order",
        _MANAGER,
        "mine = [here[block] for block in blocks]",
        "mine = [here[block] for block in blocks[::-1]]",
    ),
    Plant(
        "blocks that come back have a holder too many",
        _MANAGER,
        "self.ref_counts[list(here.values())] -= 1",
        "self.ref_counts[list(here.values())] -= 0",
    ),
)
