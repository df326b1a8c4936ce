"""From the tensors of a checkpoint to the weights of a model, by the model's name table.

Everything is checked before the first large array is made: each tensor the table names is there and
has the right shape, and each tensor of the file is named by the table. Parts of one entry (query,
key and value, say) are read straight into their place in one array.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cupaged.errors import CheckpointError
from cupaged.loading.tensors import TensorReader, is_stored_as
from cupaged.ops import Ops
from cupaged.runtime.protocol import DeviceMemoryError

_logger = logging.getLogger(__name__)
_SHOWN_NAMES = 8
_MOST_READERS = 4  # threads; more than the memory bus can feed
FREQUENCY_FACTORS = "rope_freqs.weight"
Format = Literal["hf", "gguf"]


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


def load_weights(
    entries: Sequence[WeightEntry], reader: TensorReader, form: Format, ops: Ops
) -> dict[str, Any]:
    """Read every entry to the device, after `check_tensors`. Entries are decoded in parallel.

    Numbers that the file has in the device's own type of 16 bits go up as they are.

    Raises:
        DeviceMemoryError: the device has no memory for one, which is named.
    """

    def read(entry: WeightEntry) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
        dtype = np.dtype(ops.dtype)
        infos = [reader.tensors[f"{getattr(part, form)}.weight"] for part in entry.parts]
        as_stored = entry.kind == "linear" and all(is_stored_as(info, dtype) for info in infos)
        return read_entry(entry, reader, form, dtype if as_stored else np.float32)

    weights: dict[str, Any] = {}
    with ThreadPoolExecutor(_MOST_READERS, "cupaged-read") as readers:
        for entry, (weight, bias) in zip(entries, readers.map(read, entries), strict=True):
            is_vector = entry.kind == "vector"
            try:
                weights[entry.name] = (
                    ops.asarray(weight) if is_vector else ops.pack_weight(weight, bias)
                )
            except DeviceMemoryError as error:
                raise DeviceMemoryError(f"{entry.name!r}: {error}") from error
    return weights


def read_entry(
    entry: WeightEntry, reader: TensorReader, form: Format, dtype: DTypeLike = np.float32
) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
    """The weight of an entry, each part in its place, and its bias if it has one.

    dtype: of the weight; float32, or the type of 16 bits that all its parts are stored in.
    """
    is_vector = entry.kind == "vector"
    weight = np.empty(entry.columns if is_vector else (entry.rows, entry.columns), dtype)
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
