"""From the tensors of a checkpoint to the weights of a model, by the model's name table.

Everything is checked before the first large array is made: each tensor the table names is there and
has the right shape, and each tensor of the file is named by the table. Parts of one entry (query,
key and value, say) are read straight into their place in one array.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cupaged.errors import CheckpointError, NotSupportedError
from cupaged.loading.tensors import TensorReader
from cupaged.ops import BLOCK_ELEMENTS, STORED_DTYPES, Ops
from cupaged.runtime.protocol import DeviceMemoryError

_logger = logging.getLogger(__name__)
_SHOWN_NAMES = 8
_MOST_READERS = 4  # threads; more than the memory bus can feed
FREQUENCY_FACTORS = "rope_freqs.weight"
Format = Literal["hf", "gguf"]
_Read: TypeAlias = tuple[NDArray[Any], NDArray[np.float32] | None]  # a weight, and its bias


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of an entry.

    hf, gguf: its name in either format, without ".weight" or ".bias".
    rows: its out_features; unused for vectors.
    gguf_heads: GGUF files of the Llama family interleave the two halves of each head's rows;
        with a number of heads here they are put back ("rotate half" order).
    """

    hf: str
    gguf: str
    rows: int = 0
    gguf_heads: int = 0


class WeightEntry:
    """One weight of a model: a row of its name table.

    Args:
        name: what the model calls it; `{i}` makes it an entry of every layer.
        kind: "linear" [sum of the parts' rows, columns], packed by the ops; "vector" [columns].
        shard_axis: the axis that several devices would share out, None for whole copies.
        parts: stacked along axis 0 in this order.
        bias: each part has a bias as well.
    """

    __slots__ = ("bias", "columns", "kind", "name", "parts", "shard_axis")

    def __init__(
        self,
        name: str,
        kind: Literal["linear", "vector"],
        columns: int,
        shard_axis: int | None,
        *parts: Part,
        bias: bool = False,
    ) -> None:
        self.name = name
        self.kind = kind
        self.columns = columns
        self.shard_axis = shard_axis
        self.parts = parts
        self.bias = bias

    @property
    def rows(self) -> int:
        """out_features of all parts; 0 for a vector."""
        return sum(part.rows for part in self.parts)

    @property
    def num_elements(self) -> int:
        """Numbers in the weight and its bias."""
        return max(1, self.rows) * self.columns + self.bias * self.rows

    def of_layer(self, i: int) -> WeightEntry:
        """The entry with `{i}` replaced."""
        parts = [replace(p, hf=p.hf.format(i=i), gguf=p.gguf.format(i=i)) for p in self.parts]
        return WeightEntry(
            self.name.format(i=i), self.kind, self.columns, self.shard_axis, *parts, bias=self.bias
        )


def expand(table: Sequence[WeightEntry], num_layers: int) -> list[WeightEntry]:
    """The table with one entry for each layer in place of each `{i}`."""
    return [
        expanded
        for entry in table
        for expanded in (
            (entry.of_layer(i) for i in range(num_layers)) if "{i}" in entry.name else (entry,)
        )
    ]


def check_tensors(
    entries: Sequence[WeightEntry], reader: TensorReader, form: Format, *, tied: bool
) -> None:
    """Compare the table with the tensors of a checkpoint.

    Args:
        tied: the head is the embedding; a head stored all the same is left unread.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or is not in the table.
    """
    left = set(reader.tensors)
    if form == "gguf":
        left.discard(FREQUENCY_FACTORS)  # `hf_config_from_gguf` has read it
    missing = []
    for name, shape in _expected(entries, form):
        info = reader.tensors.get(name)
        if info is None:
            missing.append(name)
            continue
        left.discard(name)
        if info.shape != shape:
            raise CheckpointError(
                f"{info.path}: tensor {name!r} has shape {list(info.shape)}, "
                f"the configuration says {list(shape)}"
            )
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_some(missing)}")
    unread = {name for name in left if name.endswith("rotary_emb.inv_freq")}  # made from the config
    if tied:
        unread |= left & {"lm_head.weight", "output.weight"}
    for name in sorted(unread):
        _logger.info("tensor %s is not needed and is left unread", name)
    if left - unread:
        raise CheckpointError(f"the model has no use for {_some(sorted(left - unread))}")


def stored_types(entry: WeightEntry, reader: TensorReader, form: Format) -> set[str]:
    """The types in which the parts of an entry are stored."""
    return {reader.tensors[f"{getattr(part, form)}.weight"].dtype for part in entry.parts}


def kept_type(entry: WeightEntry, reader: TensorReader, form: Format, ops: Ops) -> str | None:
    """The type in which an entry goes to the device as it is stored; None if it must be float32."""
    stored = stored_types(entry, reader, form)
    is_kept = entry.kind == "linear" and len(stored) == 1 and stored <= set(ops.kept_types)
    return stored.pop() if is_kept else None


def check_all_kept(
    entries: Sequence[WeightEntry], reader: TensorReader, form: Format, ops: Ops
) -> None:
    """Whether all linear weights go to the device as they are stored.

    Raises:
        NotSupportedError: one does not; it names its type and those that do.
    """
    for entry in entries:
        types = stored_types(entry, reader, form)
        if entry.kind == "linear" and types != {"F32"} and not kept_type(entry, reader, form, ops):
            raise NotSupportedError(
                f"{entry.name!r} is stored as {' and '.join(sorted(types))}, which cannot be kept; "
                f"one of {', '.join(('F32', *ops.kept_types))} can. Use cpu_weight_dtype='auto' to "
                "have such weights in float32"
            )


def weight_bytes(
    entries: Sequence[WeightEntry], reader: TensorReader, form: Format, ops: Ops
) -> int:
    """Memory of all weights as the device's operations lay them out. A tied head counts once."""

    def of(entry: WeightEntry) -> int:
        if entry.kind == "vector":
            return entry.columns * int(np.dtype(ops.dtype).itemsize)
        stored = kept_type(entry, reader, form, ops)
        return ops.weight_bytes(entry.rows, entry.columns, entry.bias, stored)

    return sum(of(entry) for entry in entries)


def load_weights(
    entries: Sequence[WeightEntry], reader: TensorReader, form: Format, ops: Ops
) -> dict[str, Any]:
    """Read every entry to the device, after `check_tensors`. Entries are decoded in parallel.

    Numbers that the file has in a type that the device keeps go there as they are. Beside the
    packed weights there is memory for a few entries at a time only.

    Raises:
        CheckpointError: numbers that the device cannot keep.
        DeviceMemoryError: the device has no memory for one, which is named.
    """

    def read(entry: WeightEntry) -> _Read:
        return read_entry(entry, reader, form, kept_type(entry, reader, form, ops))

    weights: dict[str, Any] = {}
    with ThreadPoolExecutor(_MOST_READERS, "cupaged-read") as readers:
        for entry, (weight, bias) in zip(entries, _in_turn(readers, read, entries), strict=True):
            is_vector = entry.kind == "vector"
            try:
                weights[entry.name] = (
                    ops.asarray(weight) if is_vector else ops.pack_weight(weight, bias)
                )
            except (DeviceMemoryError, CheckpointError) as error:
                raise type(error)(f"{entry.name!r}: {error}") from error
    return weights


def _in_turn(
    readers: ThreadPoolExecutor,
    read: Callable[[WeightEntry], _Read],
    entries: Sequence[WeightEntry],
) -> Iterator[_Read]:
    """What `read` gives for each entry; it runs ahead of whoever takes it by `_MOST_READERS`."""
    started: deque[Future[_Read]] = deque()
    for entry in entries:
        started.append(readers.submit(read, entry))
        if len(started) >= _MOST_READERS:
            yield started.popleft().result()
    while started:
        yield started.popleft().result()


def read_entry(
    entry: WeightEntry, reader: TensorReader, form: Format, stored: str | None = None
) -> _Read:
    """The weight of an entry, each part in its place, and its bias if it has one.

    stored: the type that all its parts are stored in, to have it as it is; None for float32.
    """
    is_vector = entry.kind == "vector"
    dtype = STORED_DTYPES[stored] if stored is not None else np.dtype(np.float32)
    columns = entry.columns // (BLOCK_ELEMENTS if dtype.names is not None else 1)
    weight: NDArray[Any] = np.empty(columns if is_vector else (entry.rows, columns), dtype)
    bias = np.empty(entry.rows, np.float32) if entry.bias else None
    first = 0
    for part in entry.parts:
        rows = slice(None) if is_vector else slice(first, first + part.rows)
        _read_part(reader, part, "weight", form, weight[rows])
        if bias is not None:
            _read_part(reader, part, "bias", form, bias[rows])
        first += part.rows
    return weight, bias


def _read_part(
    reader: TensorReader, part: Part, suffix: str, form: Format, out: NDArray[Any]
) -> None:
    reader.read_into(f"{getattr(part, form)}.{suffix}", out)
    if form == "gguf" and part.gguf_heads:
        pairs = out.reshape(part.gguf_heads, -1, 2, *out.shape[1:])
        out[...] = pairs.swapaxes(1, 2).reshape(out.shape)


def _expected(
    entries: Sequence[WeightEntry], form: Format
) -> Iterator[tuple[str, tuple[int, ...]]]:
    for entry in entries:
        for part in entry.parts:
            stem = getattr(part, form)
            if entry.kind == "vector":
                yield f"{stem}.weight", (entry.columns,)
                continue
            yield f"{stem}.weight", (part.rows, entry.columns)
            if entry.bias:
                yield f"{stem}.bias", (part.rows,)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN_NAMES])
    more = len(names) - _SHOWN_NAMES
    return f"{len(names)} tensors: {shown}" + (f" and {more} more" if more > 0 else "")
