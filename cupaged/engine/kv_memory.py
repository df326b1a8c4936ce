"""The KV pool of a device, as the KV sanitizer sees it: it poisons blocks and looks at slots.

Poison is a NaN with bits of its own, so that what is computed from it is no number either, and a
slot that still holds it was not written. Not in use unless the sanitizer is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from cupaged.engine.device_memory import POOL_OPTIONS, naming
from cupaged.ops import KVCache, Ops
from cupaged.ops.kv_checked_runtime import KVCheckedRuntime, KVTags, Misread

__all__ = ["DeviceKVMemory", "HoldsKV", "KVMemory", "KernelChecks"]

POISON_BITS = {"float32": 0x7FC0DEAD, "float16": 0x7EAD, "bfloat16": 0x7FED}  # quiet NaNs
_BLOCKS_AT_ONCE = 64


class KernelChecks(Protocol):
    """Kernels that check for themselves; see `KVCheckedRuntime`."""

    def expect(self, tags: KVTags) -> None:
        """Of the step that is submitted next."""

    def misread(self) -> Misread | None:
        """The first error of all steps so far; waits for them."""


class KVMemory(Protocol):
    """Keys and values of all layers."""

    kernel_checks: KernelChecks | None

    @property
    def num_layers(self) -> int:
        """Layers that have keys and values."""

    def poison(self, blocks: NDArray[np.int64]) -> None:
        """Fill blocks, in all layers, after all steps submitted so far."""

    def poisoned_share(self, layer: int, blocks: NDArray[np.int64]) -> NDArray[np.float64]:
        """[n, block_size]: how much of each slot of the blocks is poison, from 0 to 1."""


@runtime_checkable
class HoldsKV(Protocol):
    """A runner whose pool the sanitizer can look into."""

    kv_memory: KVMemory


class DeviceKVMemory:
    """The caches of a model's layers."""

    def __init__(self, ops: Ops, caches: Sequence[KVCache]) -> None:
        self._ops = ops
        self._caches = caches
        self._bits = POISON_BITS[ops.dtype.name]
        self.kernel_checks: KernelChecks | None = None
        runtime = getattr(ops, "runtime", None)
        if isinstance(runtime, KVCheckedRuntime):
            with naming("the tags of the KV sanitizer", POOL_OPTIONS):
                runtime.watch(caches)
            self.kernel_checks = runtime

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self._caches)

    def poison(self, blocks: NDArray[np.int64]) -> None:
        """One operation a layer and part of the blocks."""
        for part in _parts(blocks):
            for cache in self._caches:
                self._ops.write_blocks(cache, part, self._bits)

    def poisoned_share(self, layer: int, blocks: NDArray[np.int64]) -> NDArray[np.float64]:
        """The share over K and V together."""
        shares = []
        for part in _parts(blocks):
            k, v = self._ops.read_blocks(self._caches[layer], part)
            both = np.concatenate([self._is_poison(k), self._is_poison(v)], axis=-1)
            shares.append(both.mean(axis=(1, 3)))
        return np.concatenate(shares)

    def _is_poison(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        is_poison: NDArray[np.bool_] = values.view(f"u{values.dtype.itemsize}") == self._bits
        return is_poison


def _parts(blocks: NDArray[np.int64]) -> list[NDArray[np.int32]]:
    small = blocks.astype(np.int32)
    return [small[i : i + _BLOCKS_AT_ONCE] for i in range(0, len(small), _BLOCKS_AT_ONCE)]
