"""Defects of what is done to all sequences at once: the table of records, blocks for many."""

from __future__ import annotations

from tests.fuzz.plant import Plant

_MANAGER, _SCHEDULER = "engine/block_manager.py", "engine/scheduler.py"
_TABLE = "engine/sequence_table.py"

TABLE_PLANTS = (
    Plant(
        "a block for each of many that need one, whether free or not",
        _SCHEDULER,
        "and num_at_edge <= manager.num_free_blocks",
        "and True",
    ),
    Plant(
        "a shared block counts as writable",
        _MANAGER,
        "self.ref_counts[blocks] == 1",
        "self.ref_counts[blocks] >= 1",
    ),
    Plant(
        "a block that a step in flight copies from counts as writable",
        _MANAGER,
        "writable &= ~np.isin(blocks, list(copied))",
        "pass",
    ),
    Plant(
        "blocks given to many at once are not counted",
        _MANAGER,
        "self._num_held[rows] += 1",
        "self._num_held[rows[:1]] += 1",
    ),
    Plant(
        "a stop token is overlooked where many sequences grow at once",
        _TABLE,
        'may_end |= records[f"ending_id_{i}"] == tokens',
        "pass",
    ),
    Plant(
        "the last token of a sequence that grows is not noted",
        _TABLE,
        'self.records["last_token"][rows] = tokens',
        "pass",
    ),
)
