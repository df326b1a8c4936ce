"""A runtime around another, whose kernels check what they touch of the KV pool.

It loads the kernels of the pool with the define KV_SANITIZER, and adds to their launches what
`cuda/kv_check.cuh` needs: tags of slots, kept here for every layer, and those that a step expects.
The operations know nothing of it: an engine without the KV sanitizer has another runtime, and no
more than that. Takes memory beside what is planned: 4 bytes a slot and layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.ops.start import KVCache
from cupaged.runtime.protocol import Array, Defines, Kernel, Runtime

__all__ = ["KVCheckedRuntime", "KVTags", "Misread"]

_FILES = ("rope.cu", "kv_cache.cu", "paged_attention.cu")
_CACHE_ARGUMENT = {"rope_and_cache": 1, "copy_blocks": 0, "paged_attention": 4}
_REPORT_INTS = 8
_UNCHECKED = -1  # the step of launches that nobody expects, such as those of the warm-up


@dataclass(frozen=True, slots=True)
class KVTags:
    """What a step must find and leave; a tag is that of slot 0 of a block unless said otherwise.

    read: int32 [num_seqs, max_blocks], of the blocks of each sequence.
    write: int32 [num_tokens], of the very slot of each new token.
    copies: int32 [num_copies, 2], of source and destination.
    restored: blocks that come back from the host, with the tags of all slots, int32 [block_size].
    """

    step_id: int
    read: NDArray[np.int32]
    write: NDArray[np.int32]
    copies: NDArray[np.int32]
    restored: list[tuple[int, NDArray[np.int32]]]


@dataclass(frozen=True, slots=True)
class Misread:
    """A kernel has read, for a position of a step's sequence, a slot with another tag than that."""

    layer: int
    step_id: int
    sequence: int
    position: int
    block: int
    slot: int


class KVCheckedRuntime:
    """`Runtime`, by another one. `watch` comes before the first launch."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._kernels: dict[int, tuple[Kernel, str]] = {}  # those with more parameters, by identity
        self._layers: dict[int, int] = {}  # by the address of their keys
        self._block_size = 0
        self._step_id = _UNCHECKED

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def watch(self, caches: Sequence[KVCache]) -> None:
        """Keep tags for the slots of these layers.

        Raises:
            DeviceMemoryError: there is no memory for them.
        """
        zeros, cache = self._runtime.zeros, caches[0]
        self._block_size = cache.spec.block_size
        self._num_slots = len(cache.k) * self._block_size
        self._layers = {self._runtime.address(c.k): i for i, c in enumerate(caches)}
        self._slot_tags = zeros((len(caches), self._num_slots), np.int32)
        self._report = zeros((len(caches), _REPORT_INTS), np.int32)
        self._read = self._write = self._copies = zeros((1,), np.int32)

    def expect(self, tags: KVTags) -> None:
        """The launches from now on are those of this step."""
        self._step_id = tags.step_id
        self._read = self._runtime.from_host(tags.read)
        self._write = self._runtime.from_host(tags.write)
        if len(tags.copies):
            self._copies = self._runtime.from_host(tags.copies)
        for block, row in tags.restored:
            place = slice(block * self._block_size, (block + 1) * self._block_size)
            for layer in self._layers.values():
                self._runtime.copy_to_device(self._slot_tags[layer, place], row)

    def misread(self) -> Misread | None:
        """What was found first, in the first layer that something was found in; waits."""
        report = self._runtime.to_host(self._report)
        layers = np.flatnonzero(report[:, 0])
        if not len(layers):
            return None
        layer = int(layers[0])
        return Misread(layer, *report[layer, 1:6].tolist())

    def load_kernel(self, file: str, name: str, defines: Defines) -> Kernel:
        """With the checks, where there are some."""
        if file not in _FILES:
            return self._runtime.load_kernel(file, name, defines)
        kernel = self._runtime.load_kernel(file, name, {**defines, "KV_SANITIZER": 1})
        if name in _CACHE_ARGUMENT:
            self._kernels[id(kernel)] = kernel, name
        return kernel

    def launch(
        self,
        kernel: Kernel,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Array | np.generic],
        **options: Any,
    ) -> None:
        """With what the checks need."""
        _, name = self._kernels.get(id(kernel), (None, ""))
        self._runtime.launch(kernel, grid, block, [*args, *self._added(name, args)], **options)

    def _added(self, name: str, args: Sequence[Any]) -> list[Any]:
        if not name:
            return []
        layer = self._layers[self._runtime.address(args[_CACHE_ARGUMENT[name]])]
        tags, step = self._slot_tags[layer], np.int32(self._step_id)
        if name == "rope_and_cache":
            return [tags, self._write, step]
        if name == "copy_blocks":
            return [tags, self._copies, np.int32(self._block_size), step]
        return [tags, self._read, self._report[layer], np.int64(self._num_slots), step]
