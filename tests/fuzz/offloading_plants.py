"""Defects of the tier of the prefix cache in the host's memory to plant; see `plants`."""

from __future__ import annotations

from tests.fuzz.plant import Plant

_SCHEDULER, _RADIX = "engine/scheduler.py", "engine/radix_cache.py"
_HOST_POOL, _OFFLOADING = "engine/host_pool.py", "engine/offloading.py"

OFFLOADING_PLANTS = (
    Plant(
        "what is evicted is named in the wrong order",
        _RADIX,
        "names += self._names(node)[: -len(evicted) - 1 : -1]",
        "names += self._names(node)[-len(evicted) :]",
    ),
    Plant(
        "a node that was split keeps the names of its first part",
        _RADIX,
        ", node.names[:num_blocks]\n",
        "\n",
    ),
    Plant(
        "a shortened node keeps the names of what it lost",
        _RADIX,
        "            del node.names[len(node.blocks) :]\n",
        "",
    ),
    Plant(
        "the host's tier does not know salts",
        _RADIX,
        "() if before else each.extras",
        "()",
    ),
    Plant(
        "what is kept is found before it is written",
        _HOST_POOL,
        "return None if name in self._unwritten else self._kept.get(name)",
        "return self._kept.get(name)",
    ),
    Plant(
        "what is kept gives way though a step reads it",
        _HOST_POOL,
        "        self._idle.pop(name, None)\n        self._last_step[name] = step_id\n",
        "        self._idle[name] = None\n        self._last_step[name] = step_id\n",
    ),
    Plant(
        "what was kept last gives way first",
        _HOST_POOL,
        "self._idle.popitem(last=False)",
        "self._idle.popitem(last=True)",
    ),
    Plant(
        "what a failed step was to keep counts as kept",
        _OFFLOADING,
        "        self._pool.step_failed(plan.step_id)\n",
        "",
    ),
    Plant(
        "a prefix is loaded into the blocks before it",
        _OFFLOADING,
        "blocks[num_found:]",
        "blocks[max(0, num_found - 1) :]",
    ),
    Plant(
        "a reset forgets the device's tier alone",
        _OFFLOADING,
        "        self._pool.drop_all()\n",
        "",
    ),
    Plant(
        "what was loaded is never stored",
        _OFFLOADING,
        "                sequence.store_at = 0\n",
        "                sequence.num_stored_blocks = None\n",
    ),
    Plant(
        "what a failed request began with is kept",
        _OFFLOADING,
        "                self._pool.drop(name_block(sequence, i, self._block_size))\n",
        "                pass\n",
    ),
    Plant(
        "who opted out loads from the host",
        _OFFLOADING,
        " or not sequence.request.uses_prefix_cache:",
        ":",
    ),
    Plant(
        "the whole prompt is loaded",
        _OFFLOADING,
        "sequence.num_skippable_tokens // size",
        "sequence.num_tokens // size",
    ),
    Plant(
        "what is evicted is not saved",
        _SCHEDULER,
        "        self.offloading.save(plan)\n",
        "",
    ),
)
