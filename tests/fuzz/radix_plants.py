"""Defects of the radix tree, of holding equal blocks once, of the order that looks at prefixes."""

from __future__ import annotations

from tests.fuzz.plant import Plant

_MANAGER, _SCHEDULER = "engine/block_manager.py", "engine/scheduler.py"
_RADIX, _POLICY = "engine/radix_cache.py", "engine/scheduling_policy.py"

RADIX_PLANTS = (
    Plant(
        "equal blocks are held twice",
        _MANAGER,
        "if exchanges:",
        "if False:",
    ),
    Plant(
        "what was generated is not found",
        _SCHEDULER,
        "sequence if leaves_prefix else None",
        "None",
    ),
    Plant(
        "the tree does not know salts",
        _RADIX,
        "return key if index else key + sequence.request.cache_extras",
        "return key",
    ),
    Plant(
        "tokens of a node are compared but for the last block",
        _RADIX,
        "a, b = low * size, middle * size",
        "a, b = low * size, (middle - 1) * size",
    ),
    Plant(
        "a node that is found in part is not split",
        _RADIX,
        "                self._split(node, rest)\n                break",
        "                break",
    ),
    Plant(
        "the first part of a split node stays evictable",
        _RADIX,
        "            self.num_evictable_blocks -= num_blocks\n",
        "            self._evictable[head] = None\n",
    ),
    Plant(
        "a node that others hold grows",
        _RADIX,
        "not node.children and ref_counts.item(node.blocks[-1]) == 1:",
        "not node.children:",
    ),
    Plant(
        "a node with children grows",
        _RADIX,
        "if node.blocks and not node.children and",
        "if node.blocks and",
    ),
    Plant(
        "a block is evicted before what stands on it",
        _RADIX,
        "for node in reversed(nodes):\n            self._evictable[node]",
        "for node in nodes:\n            self._evictable[node]",
    ),
    Plant(
        "the first block of a leaf is evicted before its last",
        _RADIX,
        "evicted = node.blocks[: -self._num_evicted_at_once - 1 : -1]",
        "evicted = node.blocks[: self._num_evicted_at_once]",
    ),
    Plant(
        "what stands on forgotten blocks can be found",
        _RADIX,
        "nodes += node.children.values()",
        "pass",
    ),
    Plant(
        "blocks are stored on what was forgotten",
        _RADIX,
        "if node.start + len(node.blocks) != first:",
        "if False:",
    ),
    Plant(
        "a waiting sequence keeps a rank that it has lost",
        _POLICY,
        "        insort(self._by_rank, rank)\n        self._rank_of[sequence.order] = rank\n",
        "        insort(self._by_rank, rank)\n",
    ),
)
